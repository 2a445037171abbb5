"""The object that planning returns."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxserve.api.errors import ConfigError
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.lab import report
from jaxserve.lab.devices import Device
from jaxserve.lab.links import Link
from jaxserve.lab.records import BATCH_SIZES, DraftingPlan, StageMemory, StepCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A model planned on a mesh in a layout, without weights or devices.

    Attributes:
        model: Model as given.
        architecture: Its architecture.
        num_layers: Its decoder layers.
        dtype: Element type of its weights.
        mesh: Devices along each mesh axis.
        layout: Name of the layout.
        device: Kind of device.
        hosts: Number of hosts.
        links: Link of each mesh axis of more than one device: the slowest between its devices.
        max_model_len: Longest context in tokens.
        max_num_seqs: Most sequences per step and lane.
        max_num_batched_tokens: Most query tokens per step and lane.
        page_size: Tokens per page.
        pages_per_request: Pages of a request of ``max_model_len`` tokens.
        num_tables: Page tables per sequence, each with pages of its own.
        num_lanes: Parts of a replica with their own pages.
        model_kv_bytes_per_token: Keys and values of one token in all layers, once.
        stages: Memory of each stage.
        decode: A decode step of each of ``BATCH_SIZES``.
        prefill: A prefill step.
        drafting: Memory and times of speculative decoding; None without.
        problem: Why an engine would refuse to start; None if it would start.
        models: The model of each stage.
    """

    model: str
    architecture: str
    num_layers: int
    dtype: str
    mesh: Mapping[str, int]
    layout: str
    device: Device
    hosts: int
    links: Mapping[str, Link]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    pages_per_request: int
    num_tables: int
    num_lanes: int
    model_kv_bytes_per_token: int
    stages: tuple[StageMemory, ...]
    decode: tuple[StepCost, ...]
    prefill: StepCost
    drafting: DraftingPlan | None
    problem: str | None
    models: tuple[ShardedModel, ...] = dataclasses.field(repr=False, compare=False)

    @property
    def fits(self) -> bool:
        """Whether an engine would start: weights, the largest step and one request of ``max_model_len`` fit."""
        return self.problem is None

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    @property
    def fullest(self) -> StageMemory:
        """The stage that has room for the fewest pages."""
        return min(self.stages, key=lambda stage: (stage.num_pages, -stage.weights))

    @property
    def num_pages(self) -> int:
        """Pages of each lane that fit: those of the fullest stage, since all stages have as many."""
        return self.fullest.num_pages

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit, in all lanes and replicas together, without sliding windows."""
        return self.num_pages // self.num_tables * self.page_size * self.num_lanes * self.mesh["data"]

    @property
    def num_requests(self) -> int:
        """Requests of ``max_model_len`` tokens whose pages fit, in all lanes and replicas together."""
        return self.num_pages // self.pages_per_request * self.num_lanes * self.mesh["data"]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token on a device, of all stages the most."""
        return max(stage.kv_bytes_per_token for stage in self.stages)

    def decode_of(self, batch: int) -> StepCost:
        """Return the decode step of a batch size.

        Raises:
            ConfigError: It is not one of ``BATCH_SIZES``.
        """
        for step in self.decode:
            if step.batch == batch:
                return step
        raise ConfigError(f"batch={batch} is not planned; planned: {', '.join(map(str, BATCH_SIZES))}")

    @property
    def tables(self) -> list[report.Table]:
        """Memory, communication of a decode and a prefill step, times, and what drafts add."""
        steps = [step for step in (self.decode_of(1), self.prefill) if step.communication]
        memory = report.memory_table(self.stages, self.fullest, self.device.memory_bytes, self.page_size)
        fitting = [step.batch for step in self.decode if self.has_pages(step)]
        is_compiled = any(stage.compiled_collectives for stage in self.stages)
        compiled = [report.compiled_table(self.stages)] if is_compiled else []
        drafting = [] if self.drafting is None else report.drafting_tables(self.drafting, self.device.source)
        return [
            memory,
            *compiled,
            *map(report.communication_table, steps),
            report.time_table(self.decode, self.prefill, fitting, self.device.source),
            *drafting,
        ]

    def has_pages(self, step: StepCost) -> bool:
        """Return whether the pages of all sequences of a step fit, and the step is not larger than an engine's."""
        lanes = self.num_lanes * self.mesh["data"]
        per_lane = -(-step.batch // lanes)
        pages = -(-step.context // self.page_size) * self.num_tables * per_lane
        return pages <= self.num_pages and per_lane <= self.max_num_seqs

    @property
    def summary(self) -> str:
        """The model, the devices and the layout, on two lines."""
        axes = ", ".join(f"{axis}={size} over {self.links[axis].name}" for axis, size in self.mesh.items() if size > 1)
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        return (
            f"{self.model}: {self.architecture}, {self.num_layers} layers, {self.dtype}\n"
            f"{self.num_devices} x {self.device.name}{hosts}, layout {self.layout}{f', {axes}' if axes else ''}"
        )

    @property
    def verdict(self) -> str:
        """What fits, or why the model does not."""
        if self.problem is not None:
            return f"Does not fit: {self.problem}"
        return (
            f"Fits: {self.kv_tokens:,} tokens of KV cache ({report.size(self.model_kv_bytes_per_token)} per token on "
            f"all devices), {self.num_requests:,} requests of {self.max_model_len:,} tokens at once"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values that JSON can hold: bytes, seconds, and the source of each group of numbers."""
        skipped = {"models", "device", "links", "stages", "decode", "prefill", "drafting"}
        own = {name: value for name, value in report.fields_dict(self).items() if name not in skipped}
        derived = ("num_devices", "num_pages", "kv_tokens", "num_requests", "kv_bytes_per_token", "fits")
        return {
            **own,
            **{name: getattr(self, name) for name in derived},
            "device": self.device.as_dict(),
            "links": {axis: dataclasses.asdict(link) for axis, link in self.links.items()},
            "stages": [
                {**report.fields_dict(stage), "layers": [stage.layers.start, stage.layers.stop], "left": stage.left}
                for stage in self.stages
            ],
            "decode": [report.step_dict(step) for step in self.decode],
            "prefill": report.step_dict(self.prefill),
            "drafting": None if self.drafting is None else report.drafting_dict(self.drafting),
            "sources": report.SOURCES,
        }

    def __str__(self) -> str:
        return report.as_text(self.summary, self.tables, self.verdict)

    def _repr_html_(self) -> str:
        return report.as_html(self.summary, self.tables, self.verdict)
