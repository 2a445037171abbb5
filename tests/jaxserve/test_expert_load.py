"""Counts of the tokens that are routed to each expert, against transformers' routers."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.api.errors import ConfigError
from jaxserve.api.metric_types import prometheus_text
from jaxserve.engine.expert_load import ExpertLoad
from jaxserve.layers.expert_load import count_tokens
from tests.random_checkpoint import write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_EXPERTS, PER_TOKEN = 6, 2
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": None,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "block_size": 8,
    "compile_sizes": {"decode": [4], "mixed": [24]},
    "warm_up": False,
}
PROMPTS = [[5, 7, 11, 2] * 9, [1], [3, 1, 4, 1, 5, 9, 2, 6], [80, 81, 82] * 7, [8] * 13]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "xla": {"kernels": "xla"},
    "tiles": {"kernels": "xla", "deterministic": True},
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2": {"data_parallel_size": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_checkpoint(folder, CONFIG, seed=3)
    return folder


def routed_by_transformers(directory: Path, texts: list[list[int]]) -> np.ndarray:
    """Tokens of each expert of each layer with experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    counts = np.zeros((2, NUM_EXPERTS), np.int64)
    for text in texts:
        with torch.no_grad():
            logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            chosen = scores.reshape(len(text), NUM_EXPERTS).topk(PER_TOKEN).indices
            counts[layer] += np.bincount(chosen.numpy().ravel(), minlength=NUM_EXPERTS)
    return counts


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in ("tp1", "ep2", "dp2") else [pytest.mark.slow]) for name in LAYOUTS],
)
def test_every_token_counts_once_for_each_of_its_experts(directory: Path, layout: str) -> None:
    """Prompts in chunks and generated tokens, but no padding; the last token of a text is never computed."""
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    settings = {**SETTINGS, **LAYOUTS[layout], "expert_load_metrics": 2}
    with LLM(str(directory), **settings) as llm:
        assert not llm.expert_load().any()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        load = llm.expert_load()
        metrics = [metric for metric in llm.get_metrics() if metric.name == "jaxserve:expert_tokens"]
    texts = [[*prompt, *out.outputs[0].token_ids][:-1] for prompt, out in zip(PROMPTS, outputs, strict=True)]
    np.testing.assert_array_equal(load, routed_by_transformers(directory, texts))
    assert load.sum() == PER_TOKEN * 2 * sum(map(len, texts))
    found = {(metric.labels["layers"], int(metric.labels["expert"])): metric.value for metric in metrics}
    assert found == {(("0", "2")[row], e): load[row, e] for row in range(2) for e in range(NUM_EXPERTS)}


def test_without_the_setting_nothing_is_counted(directory: Path) -> None:
    with LLM(str(directory), **SETTINGS) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        assert not any("expert" in metric.name for metric in llm.get_metrics())
        with pytest.raises(ConfigError, match="expert_load needs an engine that counts tokens; set expert_load_metr"):
            llm.expert_load()


def test_groups_that_a_model_cannot_have(directory: Path) -> None:
    with pytest.raises(ConfigError, match="expert_load_metrics=3 exceeds the 2 layers with experts of Qwen2MoeForC"):
        LLM(str(directory), **SETTINGS, expert_load_metrics=3)
    with pytest.raises(ConfigError, match="expert_load_metrics needs a model with experts; LlamaForCausalLM has none"):
        LLM("demo", expert_load_metrics=1)
    with pytest.raises(ConfigError, match="expert_load_metrics: expected .*, got -1"):
        LLM("demo", expert_load_metrics=-1)


def test_padding_is_not_counted() -> None:
    experts = jnp.array([[0, 2], [2, 3], [3, 0], [1, 1]])
    np.testing.assert_array_equal(count_tokens(experts, jnp.int32(2), 5), [1, 0, 2, 1, 0])
    assert not count_tokens(experts, jnp.int32(0), 5).any()


def test_the_metric_has_a_series_per_group_and_expert() -> None:
    load = ExpertLoad([1, 2, 4, 5, 7], 2, 2)
    load.add(np.arange(10, dtype=np.int32).reshape(5, 2))
    load.add(np.ones((5, 2), np.int32))
    text = prometheus_text(load.collect("jaxserve:"))
    assert text.splitlines() == [
        "# HELP jaxserve:expert_tokens_total Number of tokens routed to an expert, by group of layers.",
        "# TYPE jaxserve:expert_tokens_total counter",
        'jaxserve:expert_tokens_total{layers="1-2",expert="0"} 4',
        'jaxserve:expert_tokens_total{layers="1-2",expert="1"} 6',
        'jaxserve:expert_tokens_total{layers="4-7",expert="0"} 21',
        'jaxserve:expert_tokens_total{layers="4-7",expert="1"} 24',
    ]
    np.testing.assert_array_equal(load.total()[4], [9, 10])
