"""GGUF files read as checkpoints: Hugging Face's names, shapes and order of rows, in boxes and undecoded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_architectures import ARCHITECTURES
from checkpoints.quantized.gguf_blocks import UNPACK
from checkpoints.quantized.gguf_types import TYPES
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.tensor_info import whole_index
from jaxserve.models.loading import decode
from tests.checkpoints.quantized.test_gguf_blocks import decode as decoded
from tests.gguf_files import Blocks, interleave, plain, random_blocks, write_gguf

HEADS, KV_HEADS = 4, 2
NUMBERS = {kind.name: number for number, kind in TYPES.items()}


def metadata(architecture: str, **fields: Any) -> dict[str, Any]:
    """Return metadata with the counts of heads."""
    return {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        **{f"{architecture}.{name}": value for name, value in fields.items()},
    }


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rows_of_queries_and_keys_are_put_back(tmp_path: Path) -> None:
    queries, keys, bias = floats(32, 8), floats(16, 8, seed=1), floats(32, seed=2)
    tensors = {
        "token_embd.weight": plain(floats(6, 8, seed=3)),
        "blk.1.attn_q.weight": plain(interleave(queries, HEADS)),
        "blk.1.attn_q.bias": plain(interleave(bias, HEADS)),
        "blk.1.attn_k.weight": plain(interleave(keys, KV_HEADS)),
        "blk.1.attn_v.weight": plain(keys),
        "rope_freqs.weight": plain(floats(4)),
    }
    assert not np.array_equal(interleave(queries, HEADS), queries)
    layer = "model.layers.1.self_attn"
    expected = {
        "model.embed_tokens.weight": floats(6, 8, seed=3),
        f"{layer}.q_proj.weight": queries,
        f"{layer}.q_proj.bias": bias,
        f"{layer}.k_proj.weight": keys,
        f"{layer}.v_proj.weight": keys,
    }
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("llama"), tensors)) as reader:
        assert set(reader.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(reader.read(name, whole_index(array.shape)), array)
        for start in range(33):
            for stop in range(start, 33, 3):
                rows = reader.read(f"{layer}.q_proj.weight", (slice(start, stop), slice(3, 7)))
                np.testing.assert_array_equal(rows, queries[start:stop, 3:7])
        np.testing.assert_array_equal(reader.read(f"{layer}.q_proj.bias", (slice(5, 21),)), bias[5:21])
    for other in ("qwen2", "gemma", "phi3", "olmo2"):
        assert not ARCHITECTURES[other].is_interleaved
    for other in ("granite", "smollm3"):
        assert ARCHITECTURES[other].is_interleaved


def test_norms_of_gemma_are_stored_with_one_added(tmp_path: Path) -> None:
    norm = floats(8) / 8
    tensors = {
        name: plain(1 + norm) for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_q_norm.weight")
    }
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("gemma3"), tensors)) as reader:
        assert set(reader.tensors) == {
            "model.norm.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.self_attn.q_norm.weight",
        }
        for name in reader.tensors:
            np.testing.assert_array_equal(reader.read(name, (slice(2, 8),)), (1 + norm - 1)[2:])


def test_experts_have_their_own_names(tmp_path: Path) -> None:
    gate, router, shared = floats(3, 4, 8), floats(3, 8), floats(8)
    tensors = {
        "blk.0.ffn_gate_exps.weight": plain(gate),
        "blk.0.ffn_gate_inp.weight": plain(router),
        "blk.0.ffn_gate_inp_shexp.weight": plain(shared),
    }
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("qwen2moe"), tensors)) as reader:
        mlp = "model.layers.0.mlp"
        assert set(reader.tensors) == {
            f"{mlp}.gate.weight",
            f"{mlp}.shared_expert_gate.weight",
            *(f"{mlp}.experts.{expert}.gate_proj.weight" for expert in range(3)),
        }
        for expert in range(3):
            box = reader.read(f"{mlp}.experts.{expert}.gate_proj.weight", (slice(1, 4), slice(0, 5)))
            np.testing.assert_array_equal(box, gate[expert, 1:4, :5])
        np.testing.assert_array_equal(
            reader.read(f"{mlp}.shared_expert_gate.weight", (slice(0, 1), slice(2, 8))), shared[None, 2:]
        )
        assert reader.read(f"{mlp}.shared_expert_gate.weight", (slice(1, 1), slice(2, 8))).shape == (0, 6)
    with open_checkpoint(
        write_gguf(
            tmp_path / "mixtral.gguf", metadata("llama", expert_count=3), {"blk.0.ffn_gate_exps.weight": plain(gate)}
        )
    ) as reader:
        assert set(reader.tensors) == {
            f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight" for expert in range(3)
        }


def test_old_files_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    tensors = {f"blk.3.ffn_down.{expert}.weight": plain(floats(4, 8, seed=expert)) for expert in range(2)}
    fields = metadata("llama", expert_count=2)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", fields, tensors)) as reader:
        names = [f"model.layers.3.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(2)]
        assert list(reader.tensors) == names
        for expert, name in enumerate(names):
            np.testing.assert_array_equal(reader.read(name, whole_index((4, 8))), floats(4, 8, seed=expert))
    with pytest.raises(CheckpointError, match=r"'blk.3.ffn_down.0.weight' is not one of a LlamaForCausalLM"):
        open_checkpoint(write_gguf(tmp_path / "dense.gguf", metadata("llama"), tensors))


@pytest.mark.parametrize("kind", UNPACK)
def test_boxes_of_blocks_are_those_of_the_whole(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    number = NUMBERS[kind]
    block, num_bytes = TYPES[number].block, TYPES[number].num_bytes
    rows, columns = 16, 3 * block
    blocks = random_blocks(kind, 2 * rows * 3, num_bytes, np.random.default_rng(0))
    weights = decoded(kind, blocks).reshape(2, rows, columns)
    rotated = blocks.reshape(2, rows, -1)
    tensors = {
        "blk.0.attn_q.weight": Blocks((rows, columns), number, interleave(rotated[0], HEADS).tobytes()),
        "blk.0.ffn_up_exps.weight": Blocks((2, rows, columns), number, blocks.tobytes()),
    }
    path = write_gguf(tmp_path_factory.mktemp("kind") / "m.gguf", metadata("llama", expert_count=2), tensors)
    expected = {
        "model.layers.0.self_attn.q_proj.weight": weights[0],
        "model.layers.0.block_sparse_moe.experts.0.w3.weight": weights[0],
        "model.layers.0.block_sparse_moe.experts.1.w3.weight": weights[1],
    }

    def bounds(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: (min(pair), max(pair)))

    with open_checkpoint(path) as reader:
        assert isinstance(reader, QuantizedReader) and set(reader.tensors) == set(expected)
        decoders = (reader.decode, decode)

        @settings(max_examples=10, deadline=None)
        @given(bounds(rows), bounds(columns), st.sampled_from(sorted(expected)), st.sampled_from(decoders))
        def check(across: tuple[int, int], along: tuple[int, int], name: str, decoder: Any) -> None:
            index = (slice(*across), slice(*along))
            reader.decode = decoder
            box = reader.read(name, index)
            np.testing.assert_array_equal(box, expected[name][index])
            if box.size:
                planes = reader.planes(name, index)
                assert planes.codes.shape == box.shape and planes.codes.dtype.itemsize == 1
                np.testing.assert_array_equal(planes.decode(), box)

        check()


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "deepseek2", "granitemoe"])
def test_gate_and_up_of_experts_in_one_tensor(architecture: str, tmp_path: Path) -> None:
    """Gates are the upper half of the rows, as llama.cpp's graph splits them."""
    experts, size, columns = 3, 2, 64
    blocks = random_blocks("Q4_0", experts * 2 * size * 2, 18, np.random.default_rng(0)).reshape(experts, 2 * size, -1)

    def tensor(data: np.ndarray) -> Blocks:
        return Blocks((*data.shape[:2], columns), NUMBERS["Q4_0"], np.ascontiguousarray(data).tobytes())

    together = {"blk.1.ffn_gate_up_exps.weight": tensor(blocks)}
    apart = {
        "blk.1.ffn_gate_exps.weight": tensor(blocks[:, :size]),
        "blk.1.ffn_up_exps.weight": tensor(blocks[:, size:]),
    }
    fields = metadata(architecture, expert_count=experts)
    with (
        open_checkpoint(write_gguf(tmp_path / "together.gguf", fields, together)) as found,
        open_checkpoint(write_gguf(tmp_path / "apart.gguf", fields, apart)) as expected,
    ):
        assert found.tensors == expected.tensors
        for name, info in expected.tensors.items():
            index = whole_index(info.shape)
            np.testing.assert_array_equal(found.read(name, index), expected.read(name, index))
    odd = {"blk.1.ffn_gate_up_exps.weight": tensor(blocks[:, 1:])}
    with pytest.raises(CheckpointError, match=r"shape \[3, 3, 36\], expected gate and up matrices of experts"):
        open_checkpoint(write_gguf(tmp_path / "odd.gguf", fields, odd))


@pytest.mark.parametrize("experts", [None, 3])
def test_factors_of_nvfp4(experts: int | None, tmp_path: Path) -> None:
    """A tensor has one, or one for each expert; those of activations change nothing."""
    leading = () if experts is None else (experts,)
    blocks = random_blocks("NVFP4", 2 * (experts or 1), 36, np.random.default_rng(0))
    weights = decoded("NVFP4", blocks).reshape(*leading, 2, 64)
    factors = np.arange(1, 1 + (experts or 1), dtype=np.float32)
    part = "ffn_gate" if experts is None else "ffn_gate_exps"
    tensors = {
        f"blk.0.{part}.weight": Blocks((*leading, 2, 64), NUMBERS["NVFP4"], blocks.tobytes()),
        f"blk.0.{part}.scale": plain(3 * factors),
        f"blk.0.{part}.input_scale": plain(factors),
    }
    fields = metadata("llama" if experts is None else "qwen3moe")
    expected = {"model.layers.0.mlp.gate_proj.weight": 3 * weights}
    if experts is not None:
        names = [f"model.layers.0.mlp.experts.{index}.gate_proj.weight" for index in range(experts)]
        expected = {name: weights[index] * 3 * factors[index] for index, name in enumerate(names)}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", fields, tensors)) as reader:
        assert set(reader.tensors) == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(reader.read(name, whole_index((2, 64))), array)
    tensors[f"blk.0.{part}.scale"] = plain(np.ones(2, np.float32))
    with pytest.raises(CheckpointError, match=rf"'blk.0.{part}.scale' is float32 \[2\], expected one float32 or one"):
        open_checkpoint(write_gguf(tmp_path / "bad.gguf", fields, tensors))


def test_latents_are_those_of_both_forms(tmp_path: Path) -> None:
    """Files from before April 2025 have one matrix, others two; some have all three, of which the two are copies."""
    keys, values = floats(4, 6, 3), floats(4, 5, 6, seed=1)
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(32, 6)
    parts = {"blk.0.attn_k_b.weight": plain(keys), "blk.0.attn_v_b.weight": plain(values)}
    whole = {"blk.0.attn_kv_b.weight": plain(both)}
    for tensors in (parts, whole, {**parts, **whole}):
        with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("deepseek2"), tensors)) as reader:
            (name,) = reader.tensors
            assert name == "model.layers.0.self_attn.kv_b_proj.weight"
            np.testing.assert_array_equal(reader.read(name, (slice(3, 20), slice(1, 6))), both[3:20, 1:6])
    del parts["blk.0.attn_v_b.weight"]
    with pytest.raises(CheckpointError, match="'model.layers.0.self_attn.v_b_proj.weight' is missing"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("deepseek2"), parts))


BAD = {
    "rows of heads": (
        {"general.architecture": "gptneox", "gptneox.attention.head_count": 5},
        {"blk.0.attn_qkv.weight": plain(floats(12, 4))},
        r"has shape \[12, 4\], expected rows of queries, keys and values of 5 heads",
    ),
    "architecture": (metadata("mamba"), {}, "'mamba' is not supported; supported: baichuan, .*; if the model's own"),
    "no architecture": ({"x": 1}, {}, "'general.architecture': expected a string, but it is missing"),
    "tensor": (
        metadata("llama"),
        {"blk.0.ssm_a.weight": plain(floats(2))},
        "'blk.0.ssm_a.weight' is not one of a Llama",
    ),
    "experts": (
        metadata("qwen3moe"),
        {"blk.0.ffn_up_exps.weight": plain(floats(2))},
        "has shape .2., expected one axis more",
    ),
    "heads": (
        metadata("llama"),
        {"blk.0.attn_q.weight": plain(floats(12, 4))},
        r"'blk.0.attn_q.weight' has shape \[12, 4\], expected an even number of rows for each of 4 heads",
    ),
    "layers that differ": (
        {**metadata("llama"), "llama.attention.head_count": np.array([4, 8], np.uint32)},
        {"blk.0.attn_q.weight": plain(floats(16, 4))},
        "'llama.attention.head_count': expected the same integer for all layers",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    fields, tensors, message = BAD[case]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", fields, tensors))


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    blocks = random_blocks("Q8_0", 4, 34, np.random.default_rng(0))
    blocks[2, :2] = np.array([np.inf], np.float16).view(np.uint8)
    tensors = {"token_embd.weight": Blocks((4, 32), 8, blocks.tobytes())}
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("llama"), tensors)) as reader:
        reader.read("model.embed_tokens.weight", (slice(0, 2), slice(0, 32)))
        with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' has scales that are not finite"):
            reader.read("model.embed_tokens.weight", (slice(0, 4), slice(0, 32)))
