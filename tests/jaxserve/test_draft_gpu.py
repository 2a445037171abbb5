"""Steps with drafts for GPUs that are not there: verification and the passes of each drafter, lowered and compiled."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.device.build import mesh_shape_of, plan_stages
from jaxserve.device.layout_choice import choose_layout
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.device.step_batch import BatchShape
from jaxserve.device.steps import trace_step
from jaxserve.lab.compiled import compile_step
from jaxserve.lab.hardware import get_device
from jaxserve.lab.plan.plan import read_model
from sharding import MeshShape, make_mesh
from tests import block_heads
from tests.block_heads import write_dflash
from tests.draft_heads import HEAD, write_eagle3
from tests.random_checkpoint import DEEPSEEK, LLAMA

SIZES = {"hidden_size": 128, "head_dim": 64, "vocab_size": 64}
TARGET = {**LLAMA, **SIZES, "num_hidden_layers": 3, "pard_token": 5}
HEADS = {**HEAD, **SIZES, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
LATENT = {
    **DEEPSEEK,
    "num_attention_heads": 16,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
NUM_DRAFTS = 3
DEVICE = get_device("h100")
KERNEL = "triton" if jax.__version_info__ < (0, 11) else "xla"
"""Attention whose lowering needs no GPU to ask."""


def planned(method: str, directory: Path, tensor: int = 1, backend: str | None = None) -> ShardedModel:
    """The last stage of a model on H100s, as the engine plans it."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    (directory / "config.json").write_text(json.dumps(LATENT if method == "mtp" else TARGET))
    if method == "eagle3":
        write_eagle3(directory / "head", HEADS)
        drafts["model"] = str(directory / "head")
    elif method == "dflash":
        own = {"mask_token_id": 5, "target_layer_ids": [0, 1]}
        write_dflash(directory / "head", {**block_heads.HEAD, **SIZES, "dflash_config": own})
        drafts["model"] = str(directory / "head")
    elif method in ("draft_model", "pard"):
        drafts |= {"method": "draft_model", "model": str(directory), "parallel_drafting": method == "pard"}
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
    settings |= {"dtype": "bfloat16", "tensor_parallel_size": tensor, "attention_backend": backend}
    config = EngineConfig(model=str(directory), speculative_config=drafts, **settings)
    model = read_model(config)
    mesh = make_mesh(mesh_shape_of(config, model), DEVICE.planned(tensor, tensor))
    return plan_stages(config, model, choose_layout(config, model), mesh).models[-1]


def shape_of(num_rows: int) -> BatchShape:
    """Rows that each verify ``NUM_DRAFTS`` drafts."""
    per_row = 1 + NUM_DRAFTS
    return BatchShape(
        num_tokens=num_rows * per_row, num_rows=num_rows, table_pages=4, decode_only=True, max_samples=per_row
    )


SLOW = pytest.mark.slow
CASES = [
    ("eagle3", 1),
    *[pytest.param(*case, marks=SLOW) for case in [("eagle3", 2), ("dflash", 1), ("draft_model", 2), ("pard", 2)]],
    pytest.param("ngram", 1, marks=SLOW),
    pytest.param("mtp", 1, marks=[SLOW, pytest.mark.skipif(KERNEL != "triton", reason="its experts ask for a GPU")]),
]


@pytest.mark.parametrize(("method", "tensor"), CASES)
def test_steps_with_drafts_lower_for_gpus(method: str, tensor: int, tmp_path: Path) -> None:
    """Verification and drafting are one program; the drafter attends with the kernels that the model attends with."""
    kernel = "xla" if method == "mtp" else KERNEL
    model = planned(method, tmp_path, tensor, kernel)
    drafter = [] if model.drafter is None else [model.drafter.sharded]
    assert {each.kernel.name for each in (model, *drafter)} == {kernel}
    model = model.placed(make_mesh(MeshShape(tensor=tensor)), 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of JAX, on Pallas-Triton
        text = trace_step(model, shape_of(2), "any").lower(lowering_platforms=("cuda",)).as_text()
    assert ("custom_call @__gpu$xla.gpu.triton" in text) == (kernel == "triton")
    assert ("stablehlo.all_reduce" in text) == (tensor > 1)


HAS_CUDA = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA or sys.version_info < (3, 12), reason="needs JAX's CUDA wheels")
@pytest.mark.parametrize("method", ["eagle3", "dflash", "mtp", "draft_model", "pard", "ngram"])
def test_steps_with_drafts_compile_for_gpus(method: str, tmp_path: Path) -> None:
    """The drafter's pages and states are a part of the state, which the compiler accepts as updated in place."""
    model = planned(method, tmp_path)
    found = compile_step(model, shape_of(2), DEVICE)
    assert 0 < found.temporary_bytes < 64 << 20
    assert found.collectives == {}
