"""Families with recurrent layers against transformers: on every layout, in chunks of several sizes, and preempted."""

from typing import Any

import numpy as np
import pytest
import transformers

from jaxserve import LLM, ConfigError, MemoryPlanError, SamplingParams, load_model
from jaxserve.scheduling.sequence import Sequence
from tests.hooks import pages_of_one_request
from tests.jaxserve import test_models as models
from tests.jaxserve.row_checkpoints import Maker, saved_checkpoints, with_greedy_tokens
from tests.jaxserve.test_models import GRANITE, LAYOUTS, NUM_NEW, PROMPT_LENGTHS, Row, rope
from tests.sequences import NoState

torch = pytest.importorskip("torch")

DRAFTED = [("falcon-h1", "tp2"), ("lfm2", "pp2"), ("mamba2", "tp1"), ("qwen3-next", "dp2"), ("kimi-linear", "tp2")]
METRICS = {"disable_log_stats": False}
EXACT: dict[str, dict[str, Any]] = {"kimi-linear": {"deterministic": True}}
"""Settings with which native kernels give the same bits in every batch; most families need none."""
EXPERTS = {"ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True}}
EXPERTS |= {"experts2": {"expert_parallel_size": 2, "layout": "expert_gather"}}
NAMES = ("tp1", "tp2", "tp4", "dp2", "pp2", "sequence2", "context2", "whole-attention4", *EXPERTS)
CONFIGS = {"Qwen3_5": "Qwen3_5TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
LFM2 = {"hidden_size": 48, "norm_eps": 1e-4, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
LFM2 |= {"block_multiple_of": 4, "rope_theta": 500.0}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
DELTA |= {"linear_value_head_dim": 20, "num_hidden_layers": 4, "head_dim": 16, "hidden_size": 40}
DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2, **rope("default", partial_rotary_factor=0.5)}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
QWEN_MOE |= {"shared_expert_intermediate_size": 36}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 20, "hidden_size": 48, "mamba_d_head": "auto"}
GRANITE4 = GRANITE | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
GRANITE4 |= {"shared_intermediate_size": 28}
FALCON = {"mamba_d_ssm": 96, "mamba_rms_norm": True, "key_multiplier": 0.6, "attention_out_multiplier": 0.7}
FALCON |= {"attention_in_multiplier": 1.3, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8}
FALCON |= {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.8, 1.2]}
FALCON |= {"embedding_multiplier": 1.4, "lm_head_multiplier": 0.5}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 20, "hidden_size": 48}
NEMOTRON |= {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]}
KIMI = {"linear_num_heads": 4, "linear_head_dim": 12, "num_hidden_layers": 4, "hidden_size": 40}
KIMI |= {"num_key_value_heads": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
KIMI |= {"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "routed_scaling_factor": 1.5}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
VISION |= {"num_position_embeddings": 16}
ROWS = {
    "granite4": Row(
        family="GraniteMoeHybrid",
        raw=MAMBA | GRANITE4 | {"num_local_experts": 6, "num_experts_per_tok": 3, "mamba_n_groups": 1},
        fast=("tp2",),
        num_experts=6,
    ),
    "granite4-dense": Row(
        family="GraniteMoeHybrid",
        raw=MAMBA
        | GRANITE4
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
        fast=(),
    ),
    "bamba": Row(family="Bamba", raw=MAMBA | {"attn_layer_indices": [1]}, fast=("tp4",)),
    "falcon-h1": Row(family="FalconH1", raw=MAMBA | FALCON, fast=("tp2",)),
    "falcon-h1-plain": Row(
        family="FalconH1",
        raw=MAMBA | {"mamba_d_ssm": None, "mamba_proj_bias": True, "projectors_bias": True, "attention_bias": True},
        fast=(),
    ),
    "falcon-h1-gate-first": Row(family="FalconH1", raw=MAMBA | FALCON | {"mamba_norm_before_gate": False}, fast=()),
    "nemotron-h": Row(family="NemotronH", raw=NEMOTRON | {"mlp_bias": True, "use_bias": True}, fast=("tp4",)),
    "nemotron-h-moe": Row(
        family="NemotronH",
        raw=NEMOTRON
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 6}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 28, "moe_shared_expert_intermediate_size": 36}
        | {"moe_latent_size": 24, "routed_scaling_factor": 1.5},
        fast=("ep2",),
        num_experts=6,
    ),
    "mamba2": Row(
        family="Mamba2",
        raw={"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 20, "hidden_size": 48},
        fast=("tp2",),
    ),
    "qwen3-5": Row(family="Qwen3_5", raw=DELTA, fast=("tp4",)),
    "qwen3-5-vision": Row(family="Qwen3_5", raw=DELTA | {"vision_config": VISION}, fast=("tp2",)),
    "qwen3-5-moe": Row(family="Qwen3_5Moe", raw=DELTA | QWEN_MOE, fast=("pp2",), num_experts=6),
    "qwen3-next": Row(
        family="Qwen3Next",
        raw=DELTA
        | QWEN_MOE
        | {"mlp_only_layers": [1], "attention_bias": True, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
        fast=("tp2",),
        num_experts=6,
    ),
    "kimi-linear": Row(
        family="KimiLinear",
        raw=KIMI | {"layer_types": ["linear_attention", "full_attention"] * 2},
        fast=("tp2", "ep2"),
        num_experts=6,
    ),
    "kimi-linear-groups": Row(
        family="KimiLinear",
        raw=KIMI
        | {"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 8, "head_dim": 6}}
        | {"q_lora_rank": 20, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "linear_conv_kernel_dim": 3}
        | {"attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        fast=(),
        num_experts=6,
    ),
    "lfm2": Row(family="Lfm2", raw=LFM2 | {"conv_bias": True}, fast=("tp2", "pp2")),
    "lfm2-tied": Row(
        family="Lfm2",
        raw=LFM2 | {"tie_word_embeddings": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
        fast=(),
    ),
    "lfm2-moe": Row(
        family="Lfm2Moe",
        raw=LFM2
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "num_dense_layers": 1}
        | {"routed_scaling_factor": 1.5},
        fast=("ep2",),
        num_experts=6,
    ),
}


def make_hf(row: Row) -> Any:
    """Transformers' model with random weights, none of them neutral, whose states last for a hundred tokens."""
    raw = {**models.SIZES, **row.raw}
    kind, name = "CausalLM", CONFIGS.get(row.family, f"{row.family}Config")
    if "vision_config" in raw:
        kind, name = "ConditionalGeneration", f"{row.family}Config"
        raw = {"vision_config": raw.pop("vision_config"), "text_config": raw}
    config = getattr(transformers, name)(**raw)
    config._attn_implementation = "eager"
    torch.manual_seed(row.seed)
    model = getattr(transformers, f"{row.family}For{kind}")(config).to(torch.float32).eval()
    embed_gain = 0.1 if config.get_text_config().tie_word_embeddings else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(0.002, 0.2).log_()
            elif parameter.ndim >= 2:
                gain = 6.0 if "lm_head" in name else embed_gain if "embed" in name else 1.6
                parameter.normal_(0.0, gain if "embed" in name else gain * parameter.shape[-1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
        model.tie_weights()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a row's checkpoint, once, without tokens."""
    return saved_checkpoints(ROWS, make_hf, tmp_path_factory)


@pytest.fixture(scope="module")
def checkpoint(saved: Maker) -> Maker:
    """Makes a row's checkpoint with transformers' greedy tokens, once."""
    return with_greedy_tokens(ROWS, saved)


def combinations() -> list[Any]:
    """Every row on its layouts; some of them slow."""
    return [
        pytest.param(name, layout, marks=[] if layout in row.fast else [pytest.mark.slow], id=f"{name}-{layout}")
        for name, row in ROWS.items()
        for layout in NAMES
        if layout not in EXPERTS or row.num_experts
    ]


def settings_of(layout: str, **changes: Any) -> dict[str, Any]:
    """Settings of an engine whose requests are computed in chunks of 16 tokens."""
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 8}
    settings |= {"max_model_len": PROMPT_LENGTHS[-1] + NUM_NEW, "compilation_cache_dir": "", "dtype": "float32"}
    return settings | (LAYOUTS | EXPERTS)[layout] | changes


@pytest.mark.parametrize(("name", "layout"), combinations())
def test_greedy_tokens_equal_those_of_transformers(name: str, layout: str, checkpoint: Maker) -> None:
    """Ragged, in chunks, with pages for one request at a time, so that the other is preempted, and again."""
    made = checkpoint(name)
    settings = settings_of(layout)
    pages = pages_of_one_request(made.directory, **settings)
    with LLM(str(made.directory), **settings, num_gpu_blocks_override=pages) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
        outputs = llm.generate(made.prompts, params, use_tqdm=False)
        (repeated,) = llm.generate(made.prompts[-1], params, use_tqdm=False)
        preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "jaxserve:num_preemptions")
    assert [output.outputs[0].token_ids for output in outputs] == made.expected
    assert preemptions > 0 or "dp" in layout or "experts" in layout, "both requests have run without a preemption"
    assert repeated.outputs[0].token_ids == made.expected[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if row.fast else [pytest.mark.slow]) for name, row in ROWS.items()]
)
def test_a_module_on_its_own_gives_the_logits_of_transformers(name: str, saved: Maker) -> None:
    made = saved(name)
    model = load_model(made.directory, dtype="float32")
    longest = max(made.prompts, key=len)
    tokens = np.array([longest, longest[::-1]])
    expected = np.stack([models.logits_of(made.model, row.tolist()) for row in tokens])
    np.testing.assert_allclose(np.asarray(model(tokens)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["qwen3-5", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon-h1", "kimi-linear"))]
)
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_shared_prefix_is_not_computed_again(
    name: str, is_async: bool, checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hits at every length: the same prompt, one that goes on, one that leaves it inside a page, and others between, in
    the prompt and in the answer. Logprobs are those without a cache, of native kernels bit for bit."""
    monkeypatch.setattr("jaxserve.scheduling.context_states._DISTANCE", 8)
    made = checkpoint(name)
    first = made.prompts[-1]
    params, exact = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1), EXACT.get(name, {})
    settings = settings_of("tp1", async_scheduling=is_async, num_gpu_blocks_override=99, **exact)
    with LLM(str(made.directory), **settings) as llm:
        is_exact = llm.plan.models[0].kernel.name == "native"
        (cold,) = llm.generate([first], params, use_tqdm=False)
        answer = cold.outputs[0].token_ids
        others = [
            first,
            [*first, *answer],
            [*first, *answer, 5, 7],
            *(first[:end] + [3, 9, 2] for end in range(2, 40, 5)),
            *([*first, *answer[:count], 3] for count in (8, 10)),
        ]
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in others]
        again = llm.generate(others, params, use_tqdm=False)
    assert answer == made.expected[-1][:12]
    with LLM(str(made.directory), **settings_of("tp1", enable_prefix_caching=False, **exact)) as llm:
        expected = llm.generate(others, params, use_tqdm=False)
    for found in (outputs, again):
        assert [output.outputs[0].token_ids for output in found] == [each.outputs[0].token_ids for each in expected]
        numbers, wanted = [*map(chosen_logprobs, found)], [*map(chosen_logprobs, expected)]
        np.testing.assert_allclose(numbers, wanted, rtol=0, atol=0 if is_exact else 1e-4)
    cached = [output.num_cached_tokens or 0 for output in outputs]
    assert cached[0] >= 32 and cached[1] == cached[2] == len(first) + len(answer) - 1
    assert all(found >= end // 8 * 8 for found, end in zip(cached[3:11], range(2, 40, 5), strict=True)), cached
    assert all(found >= 48 for found in cached[11:]), cached  # a state of the answer, before its last token


class Mistaken(NoState):
    """Drafts what follows in known outputs, with every third token wrong."""

    def __init__(self, outputs: list[list[int]]):
        self.outputs = outputs

    def follow(self, sequence: Sequence) -> list[int]:
        """Return the tokens after those so far."""
        length = len(sequence.token_ids)
        known = next((each for each in self.outputs if each[:length] == sequence.token_ids), [])
        return [token if at % 3 else token - 1 for at, token in enumerate(known[length : length + 4], length)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3-5", "tp1"), *(pytest.param(*each, marks=pytest.mark.slow) for each in DRAFTED)],
)
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_rejected_drafts_leave_no_trace(
    name: str, layout: str, penalty: float, checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the tokens, in logprobs nor in the states that later requests go on from."""
    made = checkpoint(name)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, logprobs=1, frequency_penalty=penalty)
    settings = settings_of(layout, num_gpu_blocks_override=99, logprobs_mode="processed_logprobs")
    settings |= EXACT.get(name, {})
    with LLM(str(made.directory), **settings) as llm:
        is_exact = llm.plan.models[0].kernel.name == "native"
        expected = llm.generate(made.prompts, params, use_tqdm=False)
        texts = [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(made.prompts, expected, strict=True)]
        longer = llm.generate([[*text[:-2], 3] for text in texts], params, use_tqdm=False)
    monkeypatch.setattr("jaxserve.engine.startup.make_proposer", lambda config: Mistaken(texts))
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
    with LLM(str(made.directory), **settings, speculative_config=drafts, **METRICS) as llm:
        found = llm.generate(made.prompts, params, use_tqdm=False)
        also = llm.generate([[*text[:-2], 3] for text in texts], params, use_tqdm=False)
        counts = {metric.name.partition("num_")[2]: metric.value for metric in llm.get_metrics() if not metric.labels}
    assert 10 < counts["accepted_tokens"] < counts["draft_tokens"] - 10
    for one, other in (*zip(found, expected, strict=True), *zip(also, longer, strict=True)):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        numbers, wanted = chosen_logprobs(one), chosen_logprobs(other)
        np.testing.assert_allclose(numbers, wanted, rtol=0, atol=0 if is_exact else 1e-4)


def chosen_logprobs(output: Any) -> list[float]:
    """The logprob of each token of the first completion."""
    (completion, *_) = output.outputs
    return [each[token].logprob for each, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def test_samples_of_one_prompt_start_from_its_state(checkpoint: Maker) -> None:
    """And on two devices, to which it has moved; misses have reasons."""
    made = checkpoint("qwen3-5")
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=12, n=3)
    with LLM(str(made.directory), **settings_of("tp1", num_gpu_blocks_override=99, **METRICS)) as llm:
        (found,) = llm.generate([made.prompts[-1]], params, use_tqdm=False)
        llm.reshard(mesh="tensor=2")
        (moved,) = llm.generate([made.prompts[-1]], params, use_tqdm=False)
        (again,) = llm.generate([made.prompts[-1]], params, use_tqdm=False)
        misses = {
            metric.labels["reason"]: metric.value
            for metric in llm.get_metrics()
            if metric.name == "jaxserve:prefix_cache_misses"
        }
    for output in (found, moved, again):
        assert [sample.token_ids for sample in output.outputs] == [made.expected[-1][:12]] * 3
    assert moved.num_cached_tokens == again.num_cached_tokens == len(made.prompts[-1]) - 1
    assert again.metrics is not None and again.metrics.prefix is not None
    assert again.metrics.prefix.num_cached_tokens == again.metrics.prefix.num_shared_tokens == 39
    assert misses == {"first_seen": 1, "no_checkpoint": 0, "evicted": 0, "new_salt": 0, "not_read": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
            r"has no tensors of the layer for multi-token prediction, mtp.layers.0, which quantized copies",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}},
            r"needs a max_num_batched_tokens of at least 18, max_num_seqs=2 times 1 \+ num_speculative_tokens; got 16",
        ),
        (
            {"prefix_cache_state_bytes": 100},
            "prefix_cache_state_bytes=100 is less than one state, which has 1[05],... bytes",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide .*4 value heads of linear attention"),
        ({"max_num_seqs": 4_000_000, "max_num_batched_tokens": 4_000_000}, "for the states of max_num_seqs=4000000"),
    ],
)
def test_settings_that_recurrent_layers_cannot_have(settings: dict[str, Any], message: str, saved: Maker) -> None:
    directory = str(saved("qwen3-5").directory)
    with pytest.raises((ConfigError, MemoryPlanError), match=message):
        LLM(directory, **settings_of("tp1", **settings))


def test_no_states_are_kept_if_they_have_no_room(checkpoint: Maker, caplog: pytest.LogCaptureFixture) -> None:
    made = checkpoint("lfm2")
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with (
        caplog.at_level("INFO"),
        LLM(str(made.directory), **settings_of("tp1", prefix_cache_state_bytes=0, **METRICS)) as llm,
    ):
        llm.generate([made.prompts[-1]], params, use_tqdm=False)
        (again,) = llm.generate([made.prompts[-1]], params, use_tqdm=False)
    assert "no states of recurrent layers are kept; every prompt is computed whole" in caplog.text
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == made.expected[-1][:4]
    assert again.metrics is not None and again.metrics.prefix is not None
    assert again.metrics.prefix.miss_reason == "no_checkpoint" and again.metrics.prefix.num_recomputed_tokens == 39
