"""Names of the device mesh's axes, of the logical axes of arrays, and of a layout's choices."""

from typing import Literal, get_args

MeshAxis = Literal["data", "stage", "tensor", "expert"]
MESH_AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)

LogicalAxis = Literal[
    "vocab",
    "embed",
    "q_heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "experts",
    "expert_ffn",
    "batch",
    "pages",
    "tokens",
]
LOGICAL_AXES: tuple[LogicalAxis, ...] = get_args(LogicalAxis)

Dispatch = Literal["all_reduce", "gather", "all_to_all"]
DISPATCHES: tuple[Dispatch, ...] = get_args(Dispatch)

Residual = Literal["replicated", "tokens"]
RESIDUALS: tuple[Residual, ...] = get_args(Residual)

Logits = Literal["gathered", "split"]
LOGITS: tuple[Logits, ...] = get_args(Logits)
