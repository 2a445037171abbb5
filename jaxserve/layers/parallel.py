"""How a layer is split and stored, and its name in checkpoints."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.layers.weight_forms import DECODED, WeightForms
from sharding import ShardingLayout

VOCAB_BLOCK = 256
"""Tokens that random sampling treats as one block. Devices that keep the logits of their part of the vocabulary have
whole blocks, so that they sample the same tokens as a device with all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """How parameters are split, seen from one device; by default one device has everything.

    Attributes:
        size: Devices along the layout's tensor axis.
        expert_size: Devices along the axis that the experts are split over.
        vocab: Mesh axis the vocabulary is split over.
        heads: Mesh axis the attention heads are split over.
        ffn: Mesh axis the MLP's features are split over.
        experts: Mesh axis the experts are split over.
        expert_ffn: Mesh axis the features of each expert are split over.
        rows: Mesh axis that rows are split over, each device with its own sequences.
        dispatch: How rows reach their experts; see ``ShardingLayout``.
        residual: The hidden states between blocks; see ``ShardingLayout``.
        logits: Where logits are sampled; see ``ShardingLayout``.
        tokens: Mesh axis that the tokens of KV pages are split over.
    """

    size: int = 1
    expert_size: int = 1
    vocab: str | None = None
    heads: str | None = None
    ffn: str | None = None
    experts: str | None = None
    expert_ffn: str | None = None
    rows: str | None = None
    dispatch: str = "all_reduce"
    residual: str = "replicated"
    logits: str = "gathered"
    tokens: str | None = None

    @classmethod
    def from_layout(cls, layout: ShardingLayout, size: int, expert_size: int | None = None) -> "Parallel":
        """Return the view of a layout whose tensor axis has ``size`` devices.

        Args:
            layout: The layout.
            size: Devices along the tensor axis.
            expert_size: Devices along the axis of the experts; None: they are split over the tensor axis, if at all.
        """
        experts = layout.mesh_axis("experts")
        return cls(
            size=size,
            expert_size=1 if experts is None else expert_size or size,
            vocab=layout.mesh_axis("vocab"),
            heads=layout.mesh_axis("q_heads"),
            ffn=layout.mesh_axis("ffn"),
            experts=experts,
            expert_ffn=layout.mesh_axis("expert_ffn"),
            rows=layout.rows_axis,
            dispatch=layout.dispatch,
            residual=layout.residual,
            logits=layout.logits,
            tokens=layout.mesh_axis("tokens"),
        )

    @classmethod
    def on_mesh(cls, layout: ShardingLayout, mesh: Mesh) -> "Parallel":
        """Return the view of a layout on a mesh."""
        split = map(layout.mesh_axis, ("q_heads", "ffn", "vocab", "expert_ffn"))
        tensor, experts = next((axis for axis in split if axis is not None), None), layout.mesh_axis("experts")
        sizes = [1 if axis is None else mesh.shape[axis] for axis in (tensor, experts)]
        return cls.from_layout(layout, *sizes)

    @property
    def num_row_parts(self) -> int:
        """Number of parts that rows are split into, each with its own sequences and pages."""
        return 1 if self.rows is None else self.expert_size

    @property
    def num_head_parts(self) -> int:
        """Number of devices that attention heads are split over; 1 if attention is whole on every device."""
        return self.parts(self.heads)

    @property
    def residual_axis(self) -> str | None:
        """Mesh axis of the devices that share the rows of hidden states between blocks; None if each has all."""
        return self.heads if self.residual == "tokens" else None

    @property
    def keeps_logits(self) -> bool:
        """Whether each device keeps the logits of its part of the vocabulary."""
        return self.logits == "split" and self.vocab is not None

    def padded_vocab(self, size: int) -> int:
        """Return the vocabulary size, padded so that it splits evenly: into whole blocks, if logits are split too."""
        multiple = self.parts(self.vocab) * (VOCAB_BLOCK if self.keeps_logits else 1)
        return -(-size // multiple) * multiple

    @property
    def num_token_parts(self) -> int:
        """Number of devices that share the tokens of KV pages; 1 if each has all tokens of its key/value heads."""
        return self.parts(self.tokens)

    @property
    def kv_heads(self) -> str | None:
        """Mesh axis the key/value heads are split over: that of the query heads, unless the devices share tokens."""
        return self.heads if self.tokens is None else None

    @property
    def has_whole_attention(self) -> bool:
        """Whether the layout splits MLPs but no heads."""
        return self.heads is None and self.ffn is not None

    def parts(self, mesh_axis: str | None) -> int:
        """Return the number of devices along a mesh axis; 1 for None."""
        if mesh_axis is None:
            return 1
        return self.expert_size if mesh_axis == self.experts else self.size

    def heads_per_device(self, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
        """Return query and KV heads per device; with fewer KV heads than devices, several devices hold the same
        head."""
        return num_heads // self.num_head_parts, max(1, num_kv_heads // self.parts(self.kv_heads))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Element types of a model on a platform; matmuls always accumulate in float32.

    Attributes:
        weights: Stored parameters, and the operands of matmuls.
        activations: The residual stream, norms and activations between layers.
        kv: The pages of keys and values.
        linear: Implementation of the operation ``linear``, which multiplies by weights.
        grouped: Implementation of the operation ``grouped_matmul``, which multiplies by experts' weights.
        recurrent: Implementation of the operations that update states of recurrent layers.
        storage: Storage method of weights; see :mod:`jaxserve.layers.storage`.
        forms: The weights that stay quantized.
        quantized: Implementation of the operations that multiply by these: ``quantized_linear`` and, for experts,
            ``quantized_grouped_matmul``.
    """

    weights: str = "float32"
    activations: str = "float32"
    kv: str = "float32"
    linear: str = "xla"
    grouped: str = "xla"
    recurrent: str = "xla"
    storage: str = "plain"
    forms: WeightForms = DECODED
    quantized: str = "xla"

    @classmethod
    def for_platform(cls, dtype: str, platform: str) -> "DtypePolicy":
        """Return the fastest policy for a model of type ``dtype`` on a platform.

        XLA on CPUs is fast at bfloat16 matmuls and slow at everything else in bfloat16, so only weights are kept in a
        16-bit type there.
        """
        if dtype == "float32" or platform != "cpu":
            return cls(weights=dtype, activations=dtype, kv=dtype)
        return cls(weights=dtype, activations="float32", kv="float32")

    def __str__(self) -> str:
        quantized = f" and {self.forms}" if self.forms else ""
        others = f"activations {self.activations}, KV pages {self.kv}, accumulation float32"
        return f"weights {self.weights}{quantized}, {others}"

    @property
    def is_native(self) -> bool:
        """Whether native kernels multiply by every weight."""
        return self.linear == self.grouped == "native" and (not self.forms or self.quantized == "native")

    @property
    def activations_dtype(self) -> jnp.dtype:
        """``activations`` as a dtype."""
        return jnp.dtype(self.activations)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """Where a layer is in the model, and how it is split and stored; by default a whole model on one device.

    Attributes:
        parallel: How parameters are split.
        policy: Element types, and how weights are stored.
        module: Name of the module in checkpoints, such as ``model.layers.3.self_attn``; empty for the model itself.
    """

    parallel: Parallel = Parallel()
    policy: DtypePolicy = DtypePolicy()
    module: str = ""

    def unsplit(self) -> "Scope":
        """Return the same scope with all parameters whole on every device."""
        return dataclasses.replace(self, parallel=Parallel())

    def over(self, mesh_axis: str | None) -> "Scope":
        """Return the same scope with the number of devices along a mesh axis, for what is split over it or, for None,
        not split."""
        return dataclasses.replace(
            self, parallel=dataclasses.replace(self.parallel, size=self.parallel.parts(mesh_axis))
        )

    def at(self, name: str) -> "Scope":
        """Return the scope of a submodule, by its name relative to this one: ``mlp`` or ``model.layers.3``."""
        return dataclasses.replace(self, module=".".join(part for part in (self.module, name) if part))
