"""Work and time of decode and prefill steps: a roofline of memory, arithmetic and communication."""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.device.build import StagePlans
from jaxserve.device.program import ModelProgram
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.communication import HAND_OVER, StepCollectives
from jaxserve.lab.hardware import collective_seconds
from jaxserve.lab.placement import Placement
from jaxserve.lab.records import BATCH_SIZES, Communication, StepCost
from jaxserve.lab.work import StageWork, Work
from sharding.plan import bytes_per_device

PREFILL_TOKENS = 2048
_TOKEN_BYTES = 8  # the latest token and its position, which go back from the last stage to the others


class Steps:
    """The steps of a model on a mesh.

    Args:
        stages: The stages.
        placement: Where the devices are.
    """

    def __init__(self, stages: StagePlans, placement: Placement):
        self._stages, self._placement = stages, placement
        self._work = [StageWork(program) for program in stages.programs]
        self._collectives = StepCollectives(stages.programs[0])

    def decode(self, batch: int, context: int) -> StepCost:
        """Return the cost of a decode step of ``batch`` sequences, of ``context`` tokens each."""
        per_replica = -(-batch // self._placement.shape.data)
        per_lane = -(-per_replica // self._stages.programs[0].num_lanes)
        microbatches = min(self._placement.shape.stage, per_lane)
        rows = -(-per_lane // microbatches)
        all_rows = -(-per_replica // microbatches)
        work = [stage.decode(rows, context, all_rows) for stage in self._work]
        common = {"kind": "decode", "batch": batch, "context": context, "microbatches": microbatches, "tokens": batch}
        return self._cost(work, self._shape(rows, rows), common)

    def prefill(self, num_tokens: int) -> StepCost:
        """Return the cost of a step that computes a prompt of ``num_tokens`` tokens in each lane, one in each stage."""
        shape, microbatches = self._placement.shape, self._placement.shape.stage
        batch = self._stages.programs[0].num_lanes * shape.data * microbatches
        work = [stage.prefill(num_tokens) for stage in self._work]
        common = {"kind": "prefill", "batch": batch, "context": num_tokens, "microbatches": microbatches}
        return self._cost(work, self._shape(num_tokens, 1), {**common, "tokens": batch * num_tokens})

    def _shape(self, num_tokens: int, num_rows: int) -> BatchShape:
        program, needs = self._stages.programs[0], self._stages.needs[0]
        tile = program.row_tile or 1
        return BatchShape(
            num_tokens=-(-num_tokens // tile) * tile,
            num_rows=-(-num_rows // tile) * tile,
            table_pages=needs.table_pages,
            decode_only=num_tokens == num_rows,
            num_arguments=len(program.arguments),
            num_tables=len(needs.windows),
        )

    def _cost(self, work: Sequence[Work], shape: BatchShape, common: dict[str, Any]) -> StepCost:
        communication = [self._communication(program, shape) for program in self._stages.programs]
        spent = [self._seconds(each, rows) for each, rows in zip(work, communication, strict=True)]
        return StepCost(
            **common,
            rows=shape.num_tokens,
            weight_bytes=round(sum(each.weight_bytes for each in work)),
            kv_bytes=round(sum(each.kv_bytes for each in work)),
            flops=sum(each.flops for each in work),
            communication=_merged(communication),
            memory_s=sum(each.memory for each in spent),
            compute_s=sum(each.compute for each in spent),
            communication_s=sum(each.communication for each in spent),
            stage_s=tuple(each.total for each in spent),
        )

    def _seconds(self, work: Work, communication: Sequence[Communication]) -> "_Seconds":
        """Return the times of a step in one stage."""
        device = self._placement.device
        sharing = self._placement.devices_per_host if device.shares_host else 1
        memory = (work.weight_bytes + work.kv_bytes) / (device.bytes_per_s * device.bandwidth_share) * sharing
        compute = work.flops / device.flops_of(self._stages.programs[0].policy.weights) * sharing
        exchanged = sum((each.seconds for each in communication), 0.0)
        return _Seconds(memory, compute, exchanged, max(memory, compute) + exchanged + device.step_overhead_s)

    def _communication(self, program: ModelProgram, shape: BatchShape) -> list[Communication]:
        """Return the communication of a step in one stage, with the hand-over to the next one."""
        layers = None if program.stage is None else program.stage.layers
        rows = self._collectives.count(shape, layers)
        counts: collections.Counter[tuple[str, str, tuple[str, ...], int]] = collections.Counter()
        for part in rows:
            for each in part.found:
                counts[part.part, each.kind, each.axes, each.num_bytes] += each.times
        found = [self._row(*key, times) for key, times in counts.items()]
        num_stages = self._placement.shape.stage
        if program.is_last:
            returned = [] if program.is_first else [self._hand_over(shape.num_rows * _TOKEN_BYTES, num_stages - 1)]
            return [*found, *returned]
        hidden = program.abstract_hidden(shape.num_tokens)
        return [*found, self._hand_over(bytes_per_device(hidden.shape, hidden.dtype.itemsize, hidden.sharding))]

    def _row(self, part: str, kind: str, axes: tuple[str, ...], num_bytes: int, times: int) -> Communication:
        count = 2 if part == kind else math.prod(self._placement.sizes[axis] for axis in axes)
        link = self._placement.link(axes)
        seconds = times * collective_seconds(kind, num_bytes, count, link)
        return Communication(
            part=part,
            kind=kind,
            axes=axes,
            num_devices=count,
            times=times,
            num_bytes=num_bytes,
            link=link.name,
            seconds=seconds,
        )

    def _hand_over(self, num_bytes: int, times: int = 1) -> Communication:
        return self._row(HAND_OVER, HAND_OVER, ("stage",), num_bytes, times)


class _Seconds(NamedTuple):
    """Times of a step in one stage, in seconds."""

    memory: float
    compute: float
    communication: float
    total: float


def _merged(stages: Sequence[Sequence[Communication]]) -> tuple[Communication, ...]:
    """Return the communication of all stages, equal collectives in one row, those of a part next to each other."""
    found: dict[tuple[Any, ...], list[Communication]] = collections.defaultdict(list)
    for each in (each for stage in stages for each in stage):
        found[each.part, each.kind, each.axes, each.num_bytes, each.link, each.num_devices].append(each)
    return tuple(
        Communication(
            part=part,
            kind=kind,
            axes=axes,
            num_bytes=num_bytes,
            link=link,
            num_devices=count,
            times=sum(each.times for each in rows),
            seconds=sum(each.seconds for each in rows),
        )
        for (part, kind, axes, num_bytes, link, count), rows in found.items()
    )


def step_costs(stages: StagePlans, placement: Placement, context: int) -> tuple[tuple[StepCost, ...], StepCost]:
    """Return the costs of a decode step of each of ``BATCH_SIZES``, and of a prefill step.

    Args:
        stages: The stages.
        placement: Where the devices are.
        context: Tokens of context of each sequence in a decode step.
    """
    steps = Steps(stages, placement)
    most = min(PREFILL_TOKENS, stages.max_num_batched_tokens, stages.needs[0].max_model_len)
    return tuple(steps.decode(batch, context) for batch in BATCH_SIZES), steps.prefill(most)
