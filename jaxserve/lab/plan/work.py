"""Bytes that a step reads and arithmetic that it does on each device of a stage, from the shapes of the model."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.device.sharded_model import ShardedModel
from jaxserve.layers.kv_layout import KVSpec
from jaxserve.models.abstract import LogicalParam
from sharding.plan import bytes_per_device


class Work(NamedTuple):
    """Work of a device in one step.

    Attributes:
        weight_bytes: Weights read; of experts, those that are expected to get a token.
        kv_bytes: Keys and values read, and states of recurrent layers read and written.
        matmuls: Multiplications and additions of matmuls, by the number of rows of each.
        attention: Multiplications and additions of attention, and of updates of states.
    """

    weight_bytes: float
    kv_bytes: float
    matmuls: Mapping[int | float, float]
    attention: int | float

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return sum(self.matmuls.values()) + self.attention


@dataclasses.dataclass(frozen=True)
class _Matmul:
    """A weight of a stage on one device.

    Attributes:
        num_bytes: Its bytes, of all local experts.
        products: Multiplications per row, of one expert.
        per_token: Experts that compute each token; None for a dense weight.
        num_experts: Experts on all devices.
        is_sampled: Whether only sampled rows are multiplied: the head.
    """

    num_bytes: int
    products: int = 0
    per_token: int | None = None
    num_experts: int = 1
    is_sampled: bool = False


class StageWork:
    """The weights and pages of a stage, from which the work of any step follows.

    Args:
        sharded: The stage.
    """

    def __init__(self, sharded: ShardedModel):
        self._parallel, self._itemsize = sharded.parallel, jnp.dtype(sharded.policy.kv).itemsize
        self._matmuls, self._splits_rows = list(_matmuls(sharded)), sharded.splits_rows
        specs = sharded.abstract_model.kv_specs
        self._specs = [spec for layer in sharded.layers if (spec := specs[layer]) is not None]
        self._state_bytes = sharded.state_bytes

    @classmethod
    def of_drafter(cls, last: ShardedModel) -> "StageWork":
        """Return the drafter of a model, given its last stage, whose output head a draft head without one reads."""
        assert last.drafter is not None
        work = cls(last.drafter.sharded)
        if not any(matmul.is_sampled for matmul in work._matmuls):
            work._matmuls += [matmul for matmul in _matmuls(last) if matmul.is_sampled]
        return work

    def decode(
        self, rows: int, context: int, all_rows: int, num_tokens: int = 1, num_samples: int | None = None
    ) -> Work:
        """Return the work of a step in which each row attends to ``context`` tokens.

        Args:
            rows: Rows of each lane.
            context: Tokens of context.
            all_rows: Rows of all lanes together, which share experts.
            num_tokens: Query tokens of each row: one, and its drafts.
            num_samples: Those of them that the output head reads; None: all.
        """
        tokens, samples = rows * num_tokens, rows * (num_tokens if num_samples is None else num_samples)
        readers = tokens if self._splits_rows else rows
        seen = [float(min(context, spec.window or context)) for spec in self._specs]
        own = sum(map(self._token_bytes, self._specs, seen)) * readers + 2 * self._state_bytes * rows
        attention = sum(map(self._attention, self._specs, seen)) * tokens + self._recurrence(tokens)
        return self._work(tokens, samples, all_rows * num_tokens, own, attention)

    def prefill(self, num_tokens: int) -> Work:
        """Return the work of a step that computes a prompt of ``num_tokens`` tokens in each lane."""
        seen = [min(num_tokens / 2, float(spec.window or num_tokens)) for spec in self._specs]
        own = sum(self._token_bytes(spec, float(num_tokens)) for spec in self._specs) + 2 * self._state_bytes
        all_tokens = num_tokens * self._parallel.num_row_parts
        attention = sum(map(self._attention, self._specs, seen)) * num_tokens + self._recurrence(num_tokens)
        return self._work(num_tokens, 1, all_tokens, own, attention)

    def _recurrence(self, num_tokens: int) -> float:
        """Return the multiplications and additions of states' updates by tokens: about eight for each float32 value."""
        return 8 * self._state_bytes / 4 * num_tokens

    def _token_bytes(self, spec: KVSpec, num_tokens: float) -> float:
        """Return the bytes of keys and values that a device reads of a sequence's context."""
        features = spec.num_kv_heads * spec.head_dim * (2 if spec.value_dim is None else 1)
        return num_tokens * features * self._itemsize / self._parallel.parts(self._parallel.tokens)

    def _attention(self, spec: KVSpec, num_seen: float) -> float:
        """Return the multiplications and additions of one row's attention on a device."""
        value = spec.head_dim if spec.value_dim is None else spec.value_dim
        return 2 * spec.num_heads * (spec.head_dim + value) * num_seen / self._parallel.parts(self._parallel.tokens)

    def _work(self, num_tokens: int, num_sampled: int, shared: int, kv_bytes: float, attention: float) -> Work:
        weight_bytes, matmuls = 0.0, collections.defaultdict[int | float, float](float)
        for matmul in self._matmuls:
            rows = num_sampled if matmul.is_sampled else num_tokens
            if matmul.per_token is None:
                weight_bytes += matmul.num_bytes
                matmuls[rows] += 2 * matmul.products * rows
                continue
            share = matmul.per_token / matmul.num_experts
            chosen = 1 - (1 - share) ** shared
            weight_bytes += matmul.num_bytes * chosen
            parts = self._parallel.parts(self._parallel.experts)
            matmuls[shared * share / chosen] += 2 * matmul.products * shared * matmul.per_token / parts
        return Work(weight_bytes, kv_bytes, matmuls, attention)


def _matmuls(sharded: ShardedModel) -> Iterator[_Matmul]:
    """Yield the weights of a stage that a step reads: not embeddings, of which it reads a few rows."""
    model = sharded.abstract_model
    has_head = any(path.startswith("head.") for path in model.logical)
    for path, param in model.logical.items():
        top = path.split(".")[0]
        is_head = sharded.is_last and top == ("head" if has_head else "embed")
        if (top in ("embed", "position_embed") and not is_head) or path.startswith("per_layer.table."):
            continue
        structs = [model.params[array] for array in param.arrays]
        size = sum(bytes_per_device(each.shape, each.dtype.itemsize, each.sharding) for each in structs)
        yield _matmul(param, size, is_head)


def _matmul(param: LogicalParam, num_bytes: int, is_head: bool) -> _Matmul:
    weight = param.stored
    if weight is None:
        return _Matmul(num_bytes, is_sampled=is_head)
    products = int(np.prod(weight.local))
    if weight.experts is None:
        return _Matmul(num_bytes, products, is_sampled=is_head)
    return _Matmul(num_bytes, products, weight.experts.per_token, weight.experts.num_experts)
