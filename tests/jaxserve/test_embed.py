"""Vectors of prompts: transformers' hidden states, however the engine computes them, beside requests for texts."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, EmbeddingRequestOutput, PoolingParams, RequestError, SamplingParams
from jaxserve.api.errors import RequestFailedError
from jaxserve.api.metric_types import Histogram
from jaxserve.api.pooling_params import Pooling
from jaxserve.api.request import parse_prompt, parse_prompts
from jaxserve.engine.request_state import RequestState

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONTEXT = 96
VOCABULARY = 509
POISON = 400  # the token whose embedding is NaN in the poisoned checkpoint
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.5}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3-tied": ("Qwen3", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "dynamic-rope": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 40}),
    "poisoned": ("Llama", {}),
}
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compilation_cache_dir": "",
}
SLOW = pytest.mark.slow
LAST, MEAN = PoolingParams(normalize=False), PoolingParams(pooling="mean", normalize=False)
TEXT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, POISON, length).tolist()


PROMPTS = [random_prompt(length) for length in (3, 17, 40, 1, 33, 8)]
Reference = Callable[[list[int], Pooling], np.ndarray]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Reference]]:
    """Makes a family's checkpoint, once: its directory, and transformers' vectors."""
    torch.set_num_threads(1)

    @functools.cache
    def make(name: str) -> tuple[str, Reference]:
        family, raw = FAMILIES[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES | raw)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            model.model.norm.weight.uniform_(0.5, 1.5)
            if name == "poisoned":
                model.model.embed_tokens.weight[POISON] = torch.nan
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        base = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")

        def vector(prompt: list[int], pooling: Pooling) -> np.ndarray:
            with torch.no_grad():
                states = base(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
            return states[-1] if pooling == "last" else states.mean(0)

        return str(directory), vector

    return make


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], tuple[str, Reference]]) -> Iterator[LLM]:
    """An engine that many tests share; nothing may be left of their requests."""
    with LLM(checkpoint("llama")[0], **SETTINGS) as made:
        yield made
        check_idle(made)


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], tuple[str, Reference]]) -> Reference:
    """Transformers' vectors of ``llm``'s model."""
    return checkpoint("llama")[1]


def value(llm: LLM | AsyncLLM, name: str, **labels: str) -> float:
    (found,) = [m.value for m in llm.get_metrics() if m.name == f"jaxserve:{name}" and m.labels == labels]
    return found


def count(llm: LLM, name: str) -> int:
    """Observations of a histogram."""
    (found,) = [m for m in llm.get_metrics() if m.name == f"jaxserve:{name}"]
    assert isinstance(found, Histogram)
    return found.count


def check_idle(llm: LLM) -> None:
    assert value(llm, "compiles_after_ready") == 0
    assert value(llm, "kv_cache_usage_perc") == 0
    assert llm.engine.num_unfinished == 0


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[list[float]]:
    return [output.outputs.embedding for output in outputs]


def check_near(found: list[float] | np.ndarray | None, expected: np.ndarray) -> None:
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def submit(llm: LLM, prompt: list[int], params: SamplingParams | PoolingParams) -> RequestState:
    return llm.engine.submit(parse_prompt(prompt, default=params))


def run(llm: LLM) -> None:
    while llm.engine.num_unfinished:
        llm.engine.step()


def bits(request: RequestState) -> tuple[list[int], list[float]]:
    """A text's tokens and every bit of its log-probabilities."""
    output = request.output().outputs[0]
    assert output.logprobs is not None
    return output.token_ids, [one.logprob for entry in output.logprobs for one in dict(entry or {}).values()]


# ---------------------------------------------------------------- the reference's vectors


@pytest.mark.parametrize("params", [LAST, MEAN, PoolingParams(), PoolingParams(pooling="mean")], ids=repr)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "poisoned"])
def test_vectors_are_those_of_transformers(
    family: str, params: PoolingParams, checkpoint: Callable[[str], tuple[str, Reference]], shared: "Engines"
) -> None:
    """Prompts of all lengths together, the longer in several chunks."""
    outputs = shared(family).embed(PROMPTS, use_tqdm=False, pooling_params=params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = checkpoint(family)[1](prompt, params.pooling)
        if params.normalize:
            expected = expected / np.linalg.norm(expected)
        check_near(output.outputs.embedding, expected)
        assert output.prompt_token_ids == prompt and output.finished
        assert output.outputs.hidden_size == SIZES["hidden_size"]


Engines = Callable[[str], LLM]


@pytest.fixture(scope="module")
def shared(checkpoint: Callable[[str], tuple[str, Reference]]) -> Iterator[Engines]:
    """An engine of each family."""
    made: dict[str, LLM] = {}

    def get(family: str) -> LLM:
        if family not in made:
            made[family] = LLM(checkpoint(family)[0], **SETTINGS)
        return made[family]

    yield get
    for one in made.values():
        check_idle(one)
        one.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tensor_parallel_size": 2}, id="two devices a layer"),
        pytest.param({"data_parallel_size": 2, "max_num_seqs": 2}, id="two copies", marks=SLOW),
        pytest.param({"deterministic": True, "max_num_seqs": 8}, id="deterministic"),
        pytest.param({"block_size": 64, "max_num_batched_tokens": 256}, id="no chunks", marks=SLOW),
    ],
)
def test_settings_make_no_difference(
    settings: dict[str, Any], checkpoint: Callable[[str], tuple[str, Reference]]
) -> None:
    directory, reference = checkpoint("llama")
    prompts = [*PROMPTS, random_prompt(CONTEXT)]
    with LLM(directory, **{**SETTINGS, **settings}) as made:
        params = [LAST, MEAN] * len(prompts)
        doubled = [prompt for prompt in prompts for _ in range(2)]
        outputs = made.embed(doubled, use_tqdm=False, pooling_params=params)
        for prompt, one, output in zip(doubled, params, outputs, strict=True):
            check_near(output.outputs.embedding, reference(prompt, one.pooling))
        check_idle(made)


def test_bfloat16_is_near(checkpoint: Callable[[str], tuple[str, Reference]]) -> None:
    directory, reference = checkpoint("llama")
    with LLM(directory, **{**SETTINGS, "dtype": "bfloat16"}) as made:
        for params in (PoolingParams(), PoolingParams(pooling="mean")):
            for prompt, vector in zip(
                PROMPTS, vectors(made.embed(PROMPTS, use_tqdm=False, pooling_params=params)), strict=True
            ):
                expected = reference(prompt, params.pooling)
                cosine = expected @ vector / np.linalg.norm(expected)
                assert 0.99 < cosine < 1 - 1e-9, "a bfloat16 model's vector is near, and not the float32 one"
                assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-12)


# ---------------------------------------------------------------- cache, preemption, aborts


def test_the_last_token_alone_may_come_from_a_cached_prefix(llm: LLM, reference: Reference) -> None:
    prompt = random_prompt(50, 1)
    for params, num_cached in ((MEAN, 0), (LAST, 49), (MEAN, 0), (LAST, 49)):
        (output,) = llm.encode(prompt, params, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
        check_near(output.outputs.data, reference(prompt, params.pooling))


def test_a_text_starts_from_the_pages_that_a_vector_left(llm: LLM) -> None:
    prompt = random_prompt(40, 2)
    llm.embed(prompt, use_tqdm=False, pooling_params=MEAN)
    (output,) = llm.generate([prompt + [7]], TEXT, use_tqdm=False)
    assert output.num_cached_tokens == 40
    assert output.embedding is None and len(output.outputs[0].token_ids) == TEXT.max_tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_prompt_begins_its_sum_again(
    is_async: bool, checkpoint: Callable[[str], tuple[str, Reference]]
) -> None:
    """The text's pages are taken from the prompt for a vector, which is computed one token a step."""
    directory, reference = checkpoint("llama")
    limits = {"num_gpu_blocks_override": 12, "long_prefill_token_threshold": 1, "async_scheduling": is_async}
    with LLM(directory, **SETTINGS, **limits) as made:
        for params in (MEAN, LAST):
            text = submit(made, random_prompt(1), SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
            prompt = random_prompt(70)
            request = submit(made, prompt, params)
            run(made)
            assert request.samples[0].sequence.num_preemptions > 0
            assert text.output().outputs[0].finish_reason == "length"
            check_near(request.embedding, reference(prompt, params.pooling))
            made.reset_prefix_cache()
        check_idle(made)


@pytest.mark.parametrize("num_steps", range(6))
def test_an_aborted_request_leaves_nothing_behind(llm: LLM, num_steps: int, reference: Reference) -> None:
    """Before it runs, between its chunks, and while its last chunk is in flight."""
    request = submit(llm, random_prompt(40, 3), MEAN)
    for _ in range(num_steps):
        llm.engine.step()
    llm.engine.abort(request)
    output = request.next_output()
    assert output is not None and output.finished
    reason = output.outputs[0].finish_reason
    assert (output.embedding is None) == (reason == "abort") and reason in ("abort", "stop")
    (other,) = llm.embed(PROMPTS[1], use_tqdm=False, pooling_params=MEAN)
    check_near(other.outputs.embedding, reference(PROMPTS[1], "mean"))
    check_idle(llm)


def test_an_ended_request_has_one_output_without_tokens(llm: LLM) -> None:
    request = submit(llm, PROMPTS[2], LAST)
    found = []
    while llm.engine.num_unfinished:
        found += [request.next_output() for changed in llm.engine.step() if changed is request]
    (output,) = found
    assert output is not None and output.finished and output.error is None
    (sample,) = output.outputs
    assert (sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason) == ("", [], "stop", None)
    assert output.embedding is not None and "embedding=[40 numbers]" in repr(output)


# ---------------------------------------------------------------- beside texts


def test_texts_and_vectors_do_not_disturb_each_other(checkpoint: Callable[[str], tuple[str, Reference]]) -> None:
    """Bit for bit in the deterministic mode: alone, together, and with other chunks."""
    directory, _ = checkpoint("llama")
    settings = {**SETTINGS, "deterministic": True, "max_num_seqs": 8, "enable_prefix_caching": False}
    texts = [(random_prompt(length, 5), TEXT) for length in (5, 30, 12)]
    pooled = [(prompt, params) for prompt in (PROMPTS[2], PROMPTS[1], PROMPTS[3]) for params in (MEAN, LAST)]
    with LLM(directory, **settings) as made:
        alone = []
        for prompt, params in texts:
            alone.append(submit(made, prompt, params))
            run(made)
        for prompt, params in pooled:
            alone.append(submit(made, prompt, params))
            run(made)
        together = [submit(made, *one) for one in [*texts, *pooled]]
        run(made)
        check_idle(made)
    with LLM(directory, **{**settings, "max_num_batched_tokens": 88}) as made:
        otherwise = [submit(made, *one) for one in reversed([*texts, *pooled])][::-1]
        run(made)
    for one, two, three in zip(alone[:3], together[:3], otherwise[:3], strict=True):
        assert bits(one) == bits(two)
        assert bits(two) == bits(three)
    for one, two, three in zip(alone[3:], together[3:], otherwise[3:], strict=True):
        assert one.embedding is not None and one.embedding == two.embedding == three.embedding


def test_vectors_run_in_steps_with_all_kinds_of_texts(llm: LLM, reference: Reference) -> None:
    """Prompt log-probabilities, penalties and random sampling beside them change nothing."""
    asked = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0, prompt_logprobs=1),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=3, presence_penalty=0.5, logit_bias={3: 1.0}),
        SamplingParams(max_tokens=30, ignore_eos=True, seed=4, logprobs=2),
    ]
    for prompt in PROMPTS:
        texts = [submit(llm, random_prompt(9), params) for params in asked]
        requests = [submit(llm, prompt, params) for params in (MEAN, LAST, MEAN)]
        run(llm)
        for request in requests:
            assert request.request.pooling is not None
            check_near(request.embedding, reference(prompt, request.request.pooling.pooling))
        assert [len(text.output().outputs[0].token_ids) for text in texts] == [30] * 3


def test_states_that_are_not_numbers_fail_their_request_alone(
    checkpoint: Callable[[str], tuple[str, Reference]],
) -> None:
    directory, reference = checkpoint("poisoned")
    broken = [*PROMPTS[1][:5], POISON, *PROMPTS[1][5:]]
    with LLM(directory, **SETTINGS) as made:
        requests = [submit(made, prompt, MEAN) for prompt in (PROMPTS[0], broken, PROMPTS[5])]
        run(made)
        assert [request.metrics().is_corrupted for request in requests] == [False, True, False]
        assert requests[1].error is not None and "NaN" in str(requests[1].error) and requests[1].embedding is None
        for request in requests[::2]:
            expected = reference(request.prompt_token_ids, "mean")
            check_near(request.embedding, expected)
        with pytest.raises(RequestFailedError, match="prompt 1: the model produced NaN or infinite hidden states"):
            made.embed([PROMPTS[0], broken], use_tqdm=False)
        assert value(made, "request_success", finished_reason="error") == 2
        assert value(made, "corrupted_requests") == 2
        check_idle(made)


def test_metrics_count_prompts_and_no_tokens(checkpoint: Callable[[str], tuple[str, Reference]]) -> None:
    with LLM(checkpoint("llama")[0], **SETTINGS) as made:
        made.embed(PROMPTS, use_tqdm=False)
        made.embed(PROMPTS[2], use_tqdm=False)
        num_requests, num_tokens = len(PROMPTS) + 1, sum(map(len, PROMPTS)) + len(PROMPTS[2])
        assert value(made, "prompt_tokens") == num_tokens
        assert value(made, "prompt_tokens_cached") == len(PROMPTS[2]) - 1
        assert value(made, "generation_tokens") == 0
        assert value(made, "request_success", finished_reason="stop") == num_requests
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
            assert count(made, name) == num_requests
        assert count(made, "request_prompt_tokens") == num_requests
        for name in ("time_to_first_token_seconds", "request_generation_tokens", "request_decode_time_seconds"):
            assert count(made, name) == 0
        made.generate([PROMPTS[0]], TEXT, use_tqdm=False)
        assert count(made, "time_to_first_token_seconds") == 1 and count(made, "request_generation_tokens") == 1


# ---------------------------------------------------------------- what users call, and what they are told


def test_embed_and_encode_take_what_generate_takes(llm: LLM) -> None:
    one, other = llm.embed([{"prompt_token_ids": PROMPTS[0]}, {"prompt_token_ids": PROMPTS[1], "cache_salt": "a"}])
    assert one.request_id != other.request_id
    assert llm.embed(PROMPTS[0]) != [] and llm.embed([]) == []
    (encoded,) = llm.encode(PROMPTS[0], PoolingParams(), pooling_task="embed", use_tqdm=False)
    assert encoded.outputs.data == pytest.approx(one.outputs.embedding, abs=1e-6)
    assert "hidden_size=40" in repr(one)


def test_a_prompt_may_fill_the_context_and_no_more(llm: LLM) -> None:
    (output,) = llm.embed(random_prompt(CONTEXT), use_tqdm=False)
    assert len(output.prompt_token_ids) == CONTEXT
    with pytest.raises(RequestError, match="prompt 1: .*context length is 96 tokens. However, your prompt contains 97"):
        llm.embed([PROMPTS[0], random_prompt(CONTEXT + 1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"pooling": "max"}, "pooling must be one of last, mean; got 'max'", id="pooling"),
        pytest.param({"pooling": None}, "pooling must be one of last, mean; got None", id="no pooling"),
        pytest.param({"normalize": 1}, "normalize must be True or False, got int", id="normalize"),
        pytest.param({"dimensions": 20}, "dimensions must be None.*got 20", id="dimensions"),
        pytest.param({"poling": "mean"}, "PoolingParams has no field 'poling'; did you mean 'pooling'", id="unknown"),
    ],
)
def test_wrong_pooling_params(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        PoolingParams(**arguments)


def test_params_of_the_wrong_kind() -> None:
    with pytest.raises(RequestError, match="pooling_params must be PoolingParams or a list of them, got SamplingP"):
        parse_prompts(PROMPTS[0], SamplingParams(), PoolingParams())
    with pytest.raises(RequestError, match=r"pooling_params\[1\] must be PoolingParams, got SamplingParams"):
        parse_prompts(PROMPTS[:2], [LAST, SamplingParams()], PoolingParams())
    with pytest.raises(RequestError, match=r"lengths of prompts \(2\) and pooling_params \(1\)"):
        parse_prompts(PROMPTS[:2], [LAST], PoolingParams())
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams or a list of them, got PoolingP"):
        parse_prompts(PROMPTS[0], PoolingParams())


def test_wrong_calls(llm: LLM) -> None:
    with pytest.raises(RequestError, match="pooling_task must be 'embed'.*got 'classify'"):
        llm.encode(PROMPTS[0], pooling_task="classify")
    with pytest.raises(RequestError, match="prompt 0 has no token ids"):
        llm.embed([[]])
    with pytest.raises(RequestError, match=f"token id {VOCABULARY} is out of vocabulary"):
        llm.embed([[VOCABULARY]])
    with pytest.raises(RequestError, match="priority requires scheduling_policy='priority'"):
        llm.embed(PROMPTS[0], priority=[1])
    with pytest.raises(RequestError, match="no tokenizer; expected prompt_token_ids, got text"):
        llm.embed("a text")


def test_asyncio(checkpoint: Callable[[str], tuple[str, Reference]]) -> None:
    """Vectors beside streams of text; an abort; errors where they are read."""
    directory, reference = checkpoint("llama")

    async def embedded(engine: AsyncLLM, prompt: Any, params: PoolingParams | None, name: str) -> np.ndarray:
        outputs = [output async for output in engine.encode(prompt, params, name)]
        assert len(outputs) == 1 and outputs[0].finished and outputs[0].request_id == name
        return np.array(outputs[0].outputs.data)

    async def generated(engine: AsyncLLM, prompt: list[int]) -> int:
        last = [output async for output in engine.generate(prompt, TEXT)][-1]
        return len(last.outputs[0].token_ids)

    async def main() -> None:
        async with AsyncLLM(directory, **SETTINGS) as engine:
            pooled = asyncio.gather(*(embedded(engine, prompt, MEAN, f"v{i}") for i, prompt in enumerate(PROMPTS)))
            lengths = await asyncio.gather(*(generated(engine, prompt) for prompt in PROMPTS))
            for prompt, vector in zip(PROMPTS, await pooled, strict=True):
                check_near(vector, reference(prompt, "mean"))
            assert lengths == [TEXT.max_tokens] * len(PROMPTS)
            vector = await embedded(engine, PROMPTS[1], None, "x")
            assert np.linalg.norm(vector) == pytest.approx(1.0)
            with pytest.raises(RequestError, match="your prompt contains 97"):
                await embedded(engine, random_prompt(CONTEXT + 1), None, "y")
            with pytest.raises(RequestError, match="encode takes one prompt, got 2"):
                await embedded(engine, [PROMPTS[0], PROMPTS[1]], None, "z")
            task = asyncio.ensure_future(embedded(engine, random_prompt(CONTEXT), MEAN, "aborted"))
            await asyncio.sleep(0)
            await engine.abort("aborted")
            try:  # it may have ended before
                assert (await task).size == SIZES["hidden_size"]
            except RequestFailedError as error:
                assert "aborted" in str(error)
            assert value(engine, "compiles_after_ready") == 0 and value(engine, "kv_cache_usage_perc") == 0

    asyncio.run(main())
