"""Every family against transformers: the same greedy tokens on every layout, the same logits from a module on its own.

A new model is one row of ``ROWS``. Each is a tiny checkpoint with random weights in an awkward shape: heads wider or
narrower than hidden / heads, a vocabulary that no number of devices divides, biases and norms that are not neutral.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from jaxserve import LLM, ConfigError, SamplingParams, load_model
from tests.hooks import DISPATCHES, CheckpointError, ShardingLayout, pages_of_one_request

torch = pytest.importorskip("torch")

NUM_NEW = 32
PROMPT_LENGTHS = (3, 17, 40)
LEAST_MARGIN = 1e-3
SIZES: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LAYOUTS = {"tp1": {}, "tp2": {"tensor_parallel_size": 2}, "tp4": {"tensor_parallel_size": 4}}
LAYOUTS |= {"dp2": {"data_parallel_size": 2}}
LAYOUTS |= {"pp2": {"pipeline_parallel_size": 2}, "pp3-tp2": {"mesh": "stage=3,tensor=2"}}
LAYOUTS |= {"dp2-pp2": {"mesh": "data=2,stage=2", "stage_layers": [1, 2]}}
LAYOUTS |= {"whole-attention4": {"tensor_parallel_size": 4, "layout": "replicated_attention"}}
LAYOUTS |= {f"sequence{size}": {"tensor_parallel_size": size, "layout": "sequence_parallel"} for size in (2, 4)}
LAYOUTS |= {f"split-logits{size}": {"tensor_parallel_size": size, "layout": "split_logits"} for size in (2, 4)}
LAYOUTS |= {f"context{n}": {"tensor_parallel_size": n, "layout": "context_parallel"} for n in (2, 4)}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    f"ep{size}": {"tensor_parallel_size": size, "enable_expert_parallel": True} for size in (2, 4)
}
EXPERT_MESHES = [(tensor, expert) for expert in range(2, 9) for tensor in (1, 2, 4) if tensor * expert <= 8]
EXPERT_LAYOUTS |= {
    f"tp{tensor}-experts{expert}-{dispatch}": {
        "tensor_parallel_size": tensor,
        "expert_parallel_size": expert,
        "layout": f"expert_{dispatch}",
    }
    for tensor, expert in EXPERT_MESHES
    for dispatch in DISPATCHES
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A checkpoint to compare.

    Attributes:
        family: Prefix of transformers' classes.
        raw: Fields of config.json that differ from ``SIZES``.
        seed: Of the weights; chosen so that no two tokens are closer than ``LEAST_MARGIN``.
        is_fixed_rope: Whether the rotary embedding ignores the length; where it does not, ours is that of the final
            length from the first token on, and transformers is asked for the same.
        save: How the checkpoint is stored.
        fast: Layouts that run by default; the others are slow tests.
        num_experts: Number of experts, which runs on every layout that can split them.
    """

    family: str
    raw: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    is_fixed_rope: bool = True
    save: str = "safetensors"
    fast: tuple[str, ...] = ("tp2",)
    num_experts: int = 0

    @property
    def expert_layouts(self) -> list[str]:
        """Layouts that split the experts."""
        sizes = {"expert_parallel_size", "enable_expert_parallel"}
        assert all(sizes & layout.keys() for layout in EXPERT_LAYOUTS.values())
        return [
            name
            for name, layout in EXPERT_LAYOUTS.items()
            if self.num_experts
            and self.num_experts % layout.get("expert_parallel_size", layout["tensor_parallel_size"]) == 0
        ]


def rope(kind: str, **raw: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **raw}}


PHI3 = {"original_max_position_embeddings": 44}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 0.5}

NEOX = {
    "hidden_size": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
GEMMA = {"tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 20}
GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 12,
    "v_head_dim": 14,
    "num_key_value_heads": 8,
    "head_dim": 12,
}
QWEN_MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 28}

ROWS = {
    "llama": Row(family="Llama", fast=("tp1", "tp2", "dp2", "split-logits4"), save="shards"),
    "llama-mqa-bias-tied": Row(
        family="Llama",
        raw={"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        fast=("tp4",),
    ),
    "llama-linear": Row(
        family="Llama", raw=rope("linear", factor=4.0) | {"max_position_embeddings": 24}, fast=("tp1",)
    ),
    "llama-dynamic": Row(
        family="Llama",
        raw=rope("dynamic", factor=2.5) | {"max_position_embeddings": 40},
        is_fixed_rope=False,
        fast=("tp1",),
    ),
    "llama-yarn": Row(
        family="Llama",
        raw=rope("yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=6.0),
        fast=("tp1",),
    ),
    "llama-llama3": Row(
        family="Llama",
        raw=rope(
            "llama3",
            factor=8.0,
            original_max_position_embeddings=48,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        fast=("tp1",),
    ),
    "mistral": Row(family="Mistral", raw={"sliding_window": 10, "num_key_value_heads": 2}, save="torch"),
    "qwen2": Row(family="Qwen2", raw={"num_key_value_heads": 2, "vocab_size": 514}, fast=("tp2",)),
    "qwen2-windows": Row(family="Qwen2", raw={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": Row(family="Qwen3", raw={"head_dim": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "phi3": Row(family="Phi3", raw=PHI3 | rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": Row(
        family="Phi3",
        raw=PHI3 | rope("longrope", **LONGROPE) | {"hidden_size": 96},
        seed=1,
        is_fixed_rope=False,
        fast=("tp1",),
    ),
    "baichuan": Row(family="Llama", raw={"num_key_value_heads": 8}, save="w_pack"),
    "smollm3": Row(family="SmolLM3", raw={"no_rope_layers": [1, 0, 1], "attention_bias": True}),
    "olmo2": Row(family="Olmo2", raw={"num_key_value_heads": 2}, fast=("tp4", "whole-attention4")),
    "granite": Row(family="Granite", raw=GRANITE),
    "gemma": Row(family="Gemma", raw={"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gemma2": Row(
        family="Gemma2",
        raw=GEMMA
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma3": Row(
        family="Gemma3",
        raw=GEMMA | {"layer_types": GEMMA3_LAYERS, "rope_parameters": GEMMA3_ROPES},
        fast=("tp2",),
    ),
    "gpt-neox": Row(family="GPTNeoX", raw=NEOX, fast=("sequence2",)),
    "gpt-neox-serial": Row(family="GPTNeoX", raw=NEOX | {"use_parallel_residual": False, "attention_bias": False}),
    "gpt2": Row(family="GPT2", raw={"tie_word_embeddings": True}, fast=("tp4", "sequence4")),
    "gpt2-bare-names": Row(
        family="GPT2",
        raw={"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 52},
        save="bare",
        fast=("tp1",),
    ),
    "gpt-oss": Row(
        family="GptOss",
        raw={
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "swiglu_limit": 1.2,
            **rope("yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=6.0, truncate=False),
        },
        save="shards",
        fast=("ep2", "tp2-experts3-all_to_all", "context2"),
        num_experts=6,
    ),
    "mixtral": Row(
        family="Mixtral",
        raw={"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11},
        save="shards",
        fast=("tp2", "sequence4"),
        num_experts=5,
    ),
    "qwen2-moe": Row(
        family="Qwen2Moe",
        raw=QWEN_MOE | {"num_experts": 6, "shared_expert_intermediate_size": 36, "decoder_sparse_step": 2},
        fast=("tp2-experts2-gather",),
        num_experts=6,
    ),
    "qwen3-moe": Row(
        family="Qwen3Moe",
        raw=QWEN_MOE | {"num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]},
        fast=("tp1-experts2-all_to_all",),
        num_experts=6,
    ),
    "deepseek-v2-lite": Row(
        family="DeepseekV2", raw=DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 2}, seed=1, num_experts=8
    ),
    "deepseek-v2": Row(
        family="DeepseekV2",
        raw=DEEPSEEK
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek-v3": Row(
        family="DeepseekV3",
        raw=DEEPSEEK
        | {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "attention_bias": True}
        | rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=1.0, mscale_all_dim=0.7),
        fast=("tp2", "ep2", "tp2-experts2-gather", "context4"),
        num_experts=8,
    ),
    "kimi-k2": Row(
        family="DeepseekV3",
        raw=DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rope_interleave": False},
        fast=("tp1",),
    ),
    "granite-moe": Row(
        family="GraniteMoe",
        raw=GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 3},
        fast=("ep4", "tp1-experts2-gather"),
        num_experts=4,
    ),
}


def prompts(vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(0, vocab_size, length).tolist() for length in PROMPT_LENGTHS]


def make_hf(row: Row) -> Any:
    """Transformers' model with random weights, none of them neutral."""
    name = {"Gemma3": "Gemma3TextConfig"}.get(row.family, f"{row.family}Config")
    model_class = {"GPT2": "GPT2LMHeadModel"}.get(row.family, f"{row.family}ForCausalLM")
    config = getattr(transformers, name)(**{**SIZES, **row.raw})
    config._attn_implementation = "eager"
    torch.manual_seed(row.seed)
    model = getattr(transformers, model_class)(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 6.0 if "lm_head" in name else 1.0 if "embed" in name else 1.6
                scale = gain if "embed" in name else gain * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, scale)
            elif "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if row.family.startswith("Gemma") else 0.0)
            else:
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
        model.tie_weights()
    return model


def save(model: Any, row: Row, directory: Path) -> None:
    """Stores the checkpoint in the row's form."""
    if row.save in ("safetensors", "shards"):
        model.save_pretrained(directory, max_shard_size="60KB" if row.save == "shards" else "1GB")
        return
    model.config.save_pretrained(directory)
    tensors = dict(model.state_dict())
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), "architectures": [type(model).__name__]}
    if row.save == "w_pack":
        for layer in range(model.config.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn."
            parts = [tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"]
            tensors[f"{prefix}W_pack.weight"] = torch.cat(parts)
        raw["architectures"] = ["BaiChuanForCausalLM"]
    if row.save == "bare":
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        tensors |= {f"h.0.attn.{name}": torch.ones(1, 1, 96, 96) for name in ("bias", "masked_bias")}
    path.write_text(json.dumps(raw))
    torch.save(tensors, directory / "pytorch_model.bin")


def logits_of(model: Any, token_ids: list[int]) -> np.ndarray:
    """Transformers' logits of every token, without a cache, with the rotary embedding of the whole length."""
    for module in model.modules():
        if "inv_freq" in dict(module.named_buffers(recurse=False)):  # forget longer texts seen before
            module.max_seq_len_cached = 0
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float().numpy()


def greedy(row: Row, model: Any, prompt: list[int]) -> list[int]:
    """Transformers' greedy tokens; fails where two tokens are too close to call."""
    if row.is_fixed_rope:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = found.sequences[0, len(prompt) :].tolist()
        scores = torch.stack(found.logits)[:, 0].numpy()
    else:
        text, rows = [*prompt], []
        for _ in range(NUM_NEW):
            padding = [0] * (len(prompt) + NUM_NEW - len(text))
            rows.append(logits_of(model, text + padding)[len(text) - 1])
            text.append(int(rows[-1].argmax()))
        new, scores = text[len(prompt) :], np.stack(rows)
    best = np.sort(scores, axis=1)[:, -2:]
    margin = (best[:, 1] - best[:, 0]).min()
    assert margin > LEAST_MARGIN, f"choose another seed: two tokens are {margin:.1e} apart"
    return new


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A row's directory, transformers' model of it, and its greedy tokens for each prompt."""

    directory: Path
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Makes a row's checkpoint, once."""

    torch.set_num_threads(1)

    @functools.cache
    def make(name: str) -> Checkpoint:
        row = ROWS[name]
        model = make_hf(row)
        directory = tmp_path_factory.mktemp(name)
        save(model, row, directory)
        asked = prompts(model.config.vocab_size)
        return Checkpoint(directory, model, asked, [greedy(row, model, prompt) for prompt in asked])

    return make


def combinations() -> list[Any]:
    """Every row on every layout; some of them slow."""
    return [
        pytest.param(name, layout, marks=[] if layout in row.fast else [pytest.mark.slow], id=f"{name}-{layout}")
        for name, row in ROWS.items()
        for layout in (*LAYOUTS, *row.expert_layouts)
    ]


@pytest.mark.parametrize(("name", "layout"), combinations())
def test_greedy_tokens_equal_those_of_transformers(
    name: str, layout: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Ragged, in chunks, with pages for one request at a time, so that the other is preempted, and from the cache."""
    made = checkpoint(name)
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
    settings |= {"max_model_len": PROMPT_LENGTHS[-1] + NUM_NEW, "compilation_cache_dir": "", "dtype": "float32"}
    settings |= (LAYOUTS | EXPERT_LAYOUTS)[layout]
    pages = pages_of_one_request(made.directory, **settings)
    with LLM(str(made.directory), **settings, num_gpu_blocks_override=pages) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
        outputs = llm.generate(made.prompts, params, use_tqdm=False)
        llm.generate(made.prompts[-1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        (repeated,) = llm.generate(made.prompts[-1], params, use_tqdm=False)
        preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "jaxserve:num_preemptions")
    assert [output.outputs[0].token_ids for output in outputs] == made.expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert preemptions > 0 or "dp" in layout or "experts" in layout, "both requests have run without a preemption"
    assert repeated.num_cached_tokens, "nothing was cached"
    assert repeated.outputs[0].token_ids == made.expected[-1]


@pytest.mark.parametrize("name", ROWS)
def test_a_module_on_its_own_gives_the_logits_of_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    made = checkpoint(name)
    model = load_model(made.directory, dtype="float32")
    longest = max(made.prompts, key=len)
    tokens = np.array([longest, longest[::-1]])
    expected = np.stack([logits_of(made.model, row.tolist()) for row in tokens])
    np.testing.assert_allclose(np.asarray(model(tokens)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_deterministic_tokens_do_not_depend_on_the_batch(checkpoint: Callable[[str], Checkpoint]) -> None:
    made = checkpoint("gpt-oss")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, logprobs=1)
    settings: dict[str, Any] = {"deterministic": True, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    with LLM(str(made.directory), dtype="bfloat16", enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in made.prompts]
        together = [output.outputs[0] for output in llm.generate(made.prompts, params, use_tqdm=False)]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids and one.cumulative_logprob == other.cumulative_logprob


def test_a_module_in_another_type_is_near(checkpoint: Callable[[str], Checkpoint]) -> None:
    made = checkpoint("llama")
    tokens = np.array([made.prompts[1]])
    expected = logits_of(made.model, made.prompts[1])
    found = np.asarray(load_model(str(made.directory), dtype="bfloat16")(tokens))[0]
    assert 0 < np.abs(found - expected).mean() < 0.1 * expected.std()


def test_load_model_says_what_is_wrong(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    directory = checkpoint("llama").directory
    with pytest.raises(ConfigError, match="dtype: expected one of auto.*got 'int8'"):
        load_model(directory, dtype="int8")
    with pytest.raises(ConfigError, match="float16.*not supported on CPUs"):
        load_model(directory, dtype="half")
    with pytest.raises(ConfigError, match="no such file.*config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match="safetensors"):
        load_model(tmp_path)


def test_names_with_a_prefix_that_only_some_tensors_have(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    directory = checkpoint("gpt2-bare-names").directory
    tensors = torch.load(directory / "pytorch_model.bin")
    tensors["transformer.wpe.weight"] = tensors.pop("wpe.weight")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"(?s)missing: wpe\.weight .*unexpected: transformer\.wpe\.weight"):
        load_model(tmp_path)


def test_a_fused_tensor_of_experts_of_another_shape_is_refused(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """The matrices the wrong way round, and one expert too few."""
    made = checkpoint("gpt-oss")
    tensors = {name: tensor.contiguous() for name, tensor in made.model.state_dict().items()}
    name = "model.layers.1.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text((made.directory / "config.json").read_text())
    for wrong, shape in ((tensors[name].mT, "6, 104, 40"), (tensors[name][:5], "5, 40, 104")):
        torch.save({**tensors, name: wrong.contiguous()}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=rf"gate_up_proj has shape \[{shape}\], expected \[6, 40, 104\]"):
            load_model(tmp_path)


def test_learned_positions_limit_the_context(checkpoint: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(ConfigError, match="max_model_len=97 exceeds the model's maximum of 96 positions"):
        LLM(str(checkpoint("gpt2").directory), max_model_len=97)


def test_expert_parallelism_needs_experts_that_can_be_shared(checkpoint: Callable[[str], Checkpoint]) -> None:
    settings = {"dtype": "float32", "enable_expert_parallel": True, "tensor_parallel_size": 4}
    with pytest.raises(ConfigError, match=r"does not divide .*6 experts.*; valid sizes: 1, 2$"):
        LLM(str(checkpoint("qwen3-moe").directory), **settings)
    with pytest.raises(ConfigError, match="needs a model with experts; LlamaForCausalLM has none"):
        LLM(str(checkpoint("llama").directory), **settings)
    with pytest.raises(ConfigError, match="enable_expert_parallel needs layout='expert_parallel', got layout='repl"):
        LLM(str(checkpoint("qwen3-moe").directory), **settings, layout="replicated")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mixtral",
            {"num_local_experts": 6},
            r"missing: .*experts.5.w1.weight \[52, 40\]",
        ),
        ("mixtral", {"num_local_experts": 6}, r"block_sparse_moe.gate.weight has shape \[5, 40\], expected \[6, 40\]"),
        ("granite-moe", {"num_local_experts": 5}, r"has shape \[4, 104, 40\], expected \[5, 104, 40\]"),
        ("deepseek-v3", {"n_routed_experts": 12, "n_group": 6}, r"missing: .*experts.8.gate_proj"),
        ("deepseek-v3", {"kv_lora_rank": 24}, r"kv_b_proj.weight has shape \[192, 20\], expected \[192, 24\]"),
        ("deepseek-v3", {"n_group": 3}, r"n_group: expected a divisor of the 8 experts, got 3"),
        ("deepseek-v3", {"topk_group": 1}, r"topk_group: 1 groups of 2 experts are too few for 3"),
        ("deepseek-v3", {"scoring_func": "softmax"}, r"scoring_func: expected sigmoid, got 'softmax'"),
    ],
)
def test_experts_that_a_checkpoint_lacks_are_named_before_loading(
    name: str, change: dict[str, Any], message: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    settings = {"dtype": "float32", "compilation_cache_dir": ""}
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(str(checkpoint(name).directory), hf_overrides=change, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "qwen3-moe",
            {"expert_parallel_size": 4},
            "expert_parallel_size=4 does not divide 6 experts .*sizes: 1, 2, 3, 6$",
        ),
        ("qwen3-moe", {"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide .*; valid sizes: 1, 2, 4$"),
        ("llama", {}, "expert_parallel_size=2 needs a model with experts; LlamaForCausalLM has none"),
        (
            "qwen3-moe",
            {"layout": "expert_parallel"},
            "expert_parallel_size=2 needs layout='expert_all_reduce' or layout='expert_all_to_all' or "
            "layout='expert_gather', got layout='expert_parallel'",
        ),
        ("qwen3-moe", {"layout": "expert_ring"}, "unknown layout 'expert_ring'; supported layouts: context_parallel"),
        (
            "qwen3-moe",
            {
                "layout": ShardingLayout(
                    "own", {**dict.fromkeys(("q_heads", "kv_heads", "ffn"), "tensor"), "experts": "expert"}
                )
            },
            "layout 'own' splits ffn over tensor; .* must split expert_ffn or experts over tensor too",
        ),
        ("qwen3-moe", {"enable_expert_parallel": True}, "expert_parallel_size=2 splits .*; use only one of them"),
        (
            "qwen3-moe",
            {"expert_parallel_size": 6, "tensor_parallel_size": 2},
            "the mesh needs 12 devices, but JAX has 8",
        ),
        ("qwen3-moe", {"expert_parallel_size": 0}, "expert_parallel_size: expected an integer >= 1, got 0"),
        ("qwen3-moe", {"pipeline_parallel_size": 4}, "pipeline_parallel_size=4 exceeds the 3 layers"),
    ],
)
def test_experts_that_devices_of_their_own_cannot_share(
    name: str, settings: dict[str, Any], message: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint(name).directory), **{"dtype": "float32", "expert_parallel_size": 2, **settings})
