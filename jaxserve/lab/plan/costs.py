"""Work and time of decode and prefill steps: a roofline of memory, arithmetic and communication."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.device.build import PlannedStages
from jaxserve.device.handed_over import abstract_hidden
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.lab.links import collective_seconds
from jaxserve.lab.plan.communication import HAND_OVER, PartCollectives, StepCollectives, drafter_collectives
from jaxserve.lab.plan.placement import Placement
from jaxserve.lab.plan.work import StageWork, Work
from jaxserve.lab.records import BATCH_SIZES, Communication, StepCost
from sharding.plan import bytes_per_device

PREFILL_TOKENS = 2048
_MANY_ROWS = 1 << 20  # at which a device multiplies fastest
_TOKEN_BYTES = 8  # the latest token and its position, which go back from the last stage to the others


class Steps:
    """The steps of a model on a mesh.

    Args:
        stages: The stages.
        placement: Where the devices are.
    """

    def __init__(self, stages: PlannedStages, placement: Placement):
        self._stages, self._placement = stages, placement
        self._work = [StageWork(sharded) for sharded in stages.models]
        self._collectives = StepCollectives(stages.models[0])
        last = stages.models[-1]
        self._drafter = None if last.drafter is None else StageWork.of_drafter(last)

    def split(self, batch: int) -> "Split":
        """Return how ``batch`` sequences are divided over replicas, microbatches and lanes."""
        per_replica = -(-batch // self._placement.shape.data)
        per_lane = -(-per_replica // self._stages.models[0].num_lanes)
        microbatches = min(self._placement.shape.stage, per_lane)
        replicas = min(batch, self._placement.shape.data)
        return Split(-(-per_lane // microbatches), -(-per_replica // microbatches), microbatches, replicas)

    def decode(self, batch: int, context: int, num_drafts: int = 0) -> StepCost:
        """Return the cost of a decode step of ``batch`` sequences, of ``context`` tokens each, that verifies
        ``num_drafts`` drafts of each."""
        split, per_row = self.split(batch), 1 + num_drafts
        work = [stage.decode(split.rows, context, split.all_rows, per_row) for stage in self._work]
        common = {"kind": "decode", "batch": batch, "context": context, "tokens": batch}
        common["microbatches"] = split.microbatches
        shape = self._shape(split.rows * per_row, split.rows, per_row)
        return self._cost(work, shape, common, split.rows * per_row, split.num_steps)

    def drafter_pass(self, batch: int, context: int, num_tokens: int, num_drafts: int = 1) -> float:
        """Return the seconds in which the drafter of the last stage takes in ``num_tokens`` tokens of each sequence of
        a microbatch and guesses the tokens after the last ``num_drafts`` of them."""
        last, split = self._stages.models[-1], self.split(batch)
        assert last.drafter is not None and self._drafter is not None
        work = self._drafter.decode(split.rows, context, split.all_rows, num_tokens, num_drafts)
        found = self._rows(drafter_collectives(last, self._shape(split.rows * num_tokens, split.rows)))
        turns = self._turns(split.num_steps)
        return self._seconds(last.drafter.sharded, work, found, split.rows * num_tokens, turns).total

    def prefill(self, num_tokens: int) -> StepCost:
        """Return the cost of a step that computes a prompt of ``num_tokens`` tokens in each lane, one in each stage."""
        shape, microbatches = self._placement.shape, self._placement.shape.stage
        batch = self._stages.models[0].num_lanes * shape.data * microbatches
        work = [stage.prefill(num_tokens) for stage in self._work]
        common = {"kind": "prefill", "batch": batch, "context": num_tokens, "microbatches": microbatches}
        common["tokens"] = batch * num_tokens
        return self._cost(work, self._shape(num_tokens, 1), common, num_tokens, shape.data * microbatches)

    def _shape(self, num_tokens: int, num_rows: int, max_samples: int = 1) -> BatchShape:
        sharded, needs = self._stages.models[0], self._stages.needs[0]
        tile = sharded.row_tile or 1
        return BatchShape(
            num_tokens=-(-num_tokens // tile) * tile,
            num_rows=-(-num_rows // tile) * tile,
            table_pages=needs.table_pages,
            decode_only=num_tokens == num_rows * max_samples,
            max_samples=max_samples,
            num_arguments=len(sharded.arguments),
            num_tables=len(needs.windows),
            state_distance=sharded.state_distance,
        )

    def _cost(
        self, work: Sequence[Work], shape: BatchShape, common: dict[str, Any], num_rows: int, num_steps: int
    ) -> StepCost:
        """Return the cost of ``num_steps`` steps of ``num_rows`` rows, one of each microbatch of each replica."""
        device, sizes = self._placement.device, self._placement.sizes
        launches = len(work) * sizes["tensor"] * sizes["expert"]
        communication = [self._communication(sharded, shape) for sharded in self._stages.models]
        turns = self._turns(num_steps)
        stages = zip(self._stages.models, work, communication, strict=True)
        spent = [self._seconds(*stage, num_rows, turns) for stage in stages]
        return StepCost(
            **common,
            rows=shape.num_tokens,
            weight_bytes=round(sum(each.weight_bytes for each in work)),
            kv_bytes=round(sum(each.kv_bytes for each in work)),
            flops=sum(each.flops for each in work),
            communication=_merged(communication),
            memory_s=sum(each.memory for each in spent),
            compute_s=sum(each.compute for each in spent),
            attention_s=sum(each.attention for each in spent),
            communication_s=sum(each.communication for each in spent),
            stage_s=tuple(each.total for each in spent),
            host_s=num_steps * (device.step_overhead_s + launches * device.launch_overhead_s),
            turns=turns,
        )

    def _turns(self, num_steps: int) -> int:
        """Return the rounds in which steps run that share their host; 0 if each device works for itself."""
        return -(-num_steps // self._placement.hosts) if self._placement.device.shares_host else 0

    def _seconds(
        self, sharded: ShardedModel, work: Work, communication: Sequence[Communication], num_rows: int, turns: int
    ) -> "_Seconds":
        """Return the times of a step in one stage: matmuls and attention each take the longer of memory and
        arithmetic. Virtual devices of one host share its memory bandwidth and cores; everything except matmuls runs on
        one core per device, in ``turns`` rounds."""
        device, dtype = self._placement.device, sharded.policy.weights
        sizes, sharing, waiting = self._placement.sizes, 1, 1.0
        count = sizes["tensor"] * sizes["expert"]
        if device.shares_host:
            sharing = min(count, self._placement.devices_per_host)
            waiting = max(sharing / device.num_cores, 1 / turns)
        rate = device.bytes_per_s * device.bandwidth_share / sharing
        times = (flops / device.flops_of(dtype, rows, count) for rows, flops in work.matmuls.items())
        multiplied = sum(times) * sharing
        attended = work.attention / device.flops_of(dtype, _MANY_ROWS, count) * sharing
        attention = max(work.kv_bytes / rate, attended)
        exchanged = sum((each.seconds for each in communication), 0.0)
        overhead = len(sharded.layers) * (device.layer_overhead_s + (num_rows - 1) * device.row_overhead_s) * waiting
        return _Seconds(
            memory=(work.weight_bytes + work.kv_bytes) / rate,
            compute=multiplied + attended,
            attention=attention,
            communication=exchanged,
            total=max(work.weight_bytes / rate, multiplied) + attention + exchanged + overhead,
        )

    def _communication(self, sharded: ShardedModel, shape: BatchShape) -> list[Communication]:
        """Return the communication of a step in one stage, with the hand-over to the next one."""
        found = self._rows(self._collectives.count(shape, sharded.layers))
        num_stages = self._placement.shape.stage
        if sharded.is_last:
            returned = [] if sharded.is_first else [self._hand_over(shape.num_rows * _TOKEN_BYTES, num_stages - 1)]
            return [*found, *returned]
        hidden = abstract_hidden(sharded, shape.num_tokens)
        return [*found, self._hand_over(bytes_per_device(hidden.shape, hidden.dtype.itemsize, hidden.sharding))]

    def _rows(self, parts: Sequence[PartCollectives]) -> list[Communication]:
        """Return the collectives of parts of a model, equal ones combined."""
        counts: collections.Counter[tuple[str, str, tuple[str, ...], int]] = collections.Counter()
        for part in parts:
            for each in part.found:
                counts[part.part, each.kind, each.axes, each.num_bytes] += each.times
        return [self._row(*key, times) for key, times in counts.items()]

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


class Split(NamedTuple):
    """The sequences of a batch, divided over replicas, microbatches and lanes.

    Attributes:
        rows: Rows of each lane in a step.
        all_rows: Rows of all lanes of a replica in a step.
        microbatches: Steps of a replica in flight at once.
        replicas: Number of replicas with sequences.
    """

    rows: int
    all_rows: int
    microbatches: int
    replicas: int

    @property
    def num_steps(self) -> int:
        """Steps of all microbatches of all replicas."""
        return self.microbatches * self.replicas


class _Seconds(NamedTuple):
    """Times of a step in one stage, in seconds."""

    memory: float
    compute: float
    attention: float
    communication: float
    total: float


def _merged(stages: Sequence[Sequence[Communication]]) -> tuple[Communication, ...]:
    """Return the communication of all stages, equal collectives in one row, those of a part next to each other."""
    found: dict[tuple[Any, ...], list[Communication]] = collections.defaultdict(list)
    for each in (each for stage in stages for each in stage):
        found[each.part, each.kind, each.axes, each.num_bytes, each.link, each.num_devices].append(each)
    return tuple(
        dataclasses.replace(rows[0], times=sum(each.times for each in rows), seconds=sum(each.seconds for each in rows))
        for rows in found.values()
    )


def step_costs(steps: Steps, stages: PlannedStages, context: int) -> tuple[tuple[StepCost, ...], StepCost]:
    """Return the costs of a decode step of each of ``BATCH_SIZES``, and of a prefill step.

    Args:
        steps: The steps.
        stages: The stages.
        context: Tokens of context of each sequence in a decode step.
    """
    most = min(PREFILL_TOKENS, stages.max_num_batched_tokens, stages.needs[0].max_model_len)
    return tuple(steps.decode(batch, context) for batch in BATCH_SIZES), steps.prefill(most)
