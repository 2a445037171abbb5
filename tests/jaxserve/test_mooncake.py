"""Conversations of a real trace through the engine: what its prefix cache finds, and that answers stay the same."""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve import LLM, RequestOutput, SamplingParams
from jaxserve.bench.traces import Trace, random_prompt, read_trace, scale_trace
from scripts.scheduler_simulation import trace_reuse

NUM_REQUESTS = 300
PAGE_SIZE = 8  # a page for each 512 tokens of the trace
HIDDEN, MLP, VOCABULARY = 16, 24, 288
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": PAGE_SIZE,
    "num_gpu_blocks_override": 12_000,  # all of the trace
    "compilation_cache_dir": "",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose attention outweighs the rest, so that an answer depends on all of its prompt."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (24, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (12, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (12, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 24),
        "model.layers.0.mlp.gate_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (MLP, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, MLP),
    }
    weights = {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    weights["model.layers.0.self_attn.o_proj.weight"] *= 4
    save_file(weights, directory / "model.safetensors")
    return directory


def first_requests(trace: Trace) -> Trace:
    """The trace's beginning: little is shared but the first page."""
    return trace._replace(requests=trace.requests[:NUM_REQUESTS])


def conversations(trace: Trace) -> Trace:
    """The first requests of those that share more than the first piece with at least two others."""
    beginnings = collections.Counter(request.piece_ids[:2] for request in trace.requests)
    chosen = [r for r in trace.requests if len(r.piece_ids) > 1 and beginnings[r.piece_ids[:2]] > 2]
    return trace._replace(requests=chosen[:NUM_REQUESTS])


def answers(llm: LLM, trace: Trace) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": random_prompt(trace, i, VOCABULARY, seed=0)} for i in range(len(trace.requests))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True, logprobs=2)
        for request in trace.requests
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def metrics(llm: LLM) -> dict[str, float]:
    return {metric.name.removeprefix("jaxserve:"): metric.value for metric in llm.get_metrics() if not metric.labels}


@pytest.mark.parametrize(
    ("choose", "reuse"), [pytest.param(first_requests, 0.08, marks=pytest.mark.slow), (conversations, 0.41)]
)
def test_hits_are_the_traces_own_reuse_and_answers_stay(
    choose: Any, reuse: float, model: Path, shared_data: Path
) -> None:
    whole = read_trace(shared_data / "traces" / "mooncake" / "conversation_trace.jsonl")
    trace = scale_trace(choose(whole), PAGE_SIZE)
    expected = trace_reuse(trace, PAGE_SIZE)
    assert len(trace.requests) == NUM_REQUESTS
    assert expected.rate == pytest.approx(reuse, abs=0.01)

    with LLM(str(model), **SETTINGS, enable_prefix_caching=True) as llm:
        cached = answers(llm, trace)
        found = metrics(llm)
    assert found["prefix_cache_queries"] == expected.num_prompt_tokens
    assert found["prefix_cache_hits"] / found["prefix_cache_queries"] == pytest.approx(expected.rate, abs=0.02)
    assert sum(output.num_cached_tokens or 0 for output in cached) == found["prefix_cache_hits"]
    assert found["compiles_after_ready"] == 0
    with LLM(str(model), **SETTINGS, enable_prefix_caching=False) as llm:
        plain = answers(llm, trace)
        assert metrics(llm)["prefix_cache_hits"] == 0
    assert [o.outputs[0].token_ids for o in cached] == [o.outputs[0].token_ids for o in plain]
