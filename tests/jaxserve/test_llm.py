"""``LLM`` as its users meet it: what it takes, what it says when something is wrong, and that nothing is lost then."""

import functools
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from jaxserve import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineDeadError,
    RequestError,
    SamplingParams,
    UnsupportedModelError,
)
from tests.hooks import (
    CheckpointError,
    ShardingLayout,
    UnsupportedKernelError,
    count_compiled,
    interrupt_step,
    layout_name,
    num_replicas,
    num_unfinished,
    plan_only,
    planned_kernel,
    pretend_to_plan_for_a_hopper,
    refuse_to_compile,
    watch_kernel_sizes,
    watch_programs,
    watch_warm_ups,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 288,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "dtype": "float32",
}
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compilation_cache_dir": "",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def tensors() -> dict[str, np.ndarray]:
    """Random weights of the model in ``CONFIG``, by the names of the checkpoint."""
    generator = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (288, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (288, 16),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (24, 16),
        "model.layers.0.self_attn.k_proj.weight": (12, 16),
        "model.layers.0.self_attn.v_proj.weight": (12, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 24),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 24),
    }
    return {name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def tiny_model(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights, a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("tiny_model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_directory / name, directory / name)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    return directory


@pytest.fixture
def broken(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model to damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **SETTINGS) as made:
        yield made


@pytest.fixture
def without_type_checks() -> Iterator[None]:
    """The type checks that tests run with would see wrong types before our own checks do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where an error comes only after compiling has begun."""
    refuse_to_compile(monkeypatch)


def metrics(llm: LLM) -> dict[str, float]:
    return {metric.name.removeprefix("jaxserve:"): metric.value for metric in llm.get_metrics()}


# ---------------------------------------------------------------- prompts and parameters

IDS = {"prompt_token_ids": [1, 5]}


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (7, None, "prompt"),
        (["hello", 3.5], None, "prompt 1"),
        (["hello", {"text": "x"}], None, "prompt 1.*'prompt'"),
        ([IDS, {"prompt_token_ids": []}], None, "prompt 1 has no token ids; at least one is required"),
        ([IDS, {"prompt_token_ids": [2, 288]}], None, "prompt 1: token id 288.*expected ids from 0 to 287"),
        ([{"prompt_token_ids": [2**40]}], None, "prompt 0: token id 1099511627776"),
        ([IDS, IDS, {"prompt_token_ids": [3, -1]}], None, "prompt 2: token ids must be at least 0, got -1"),
        ([IDS, {"prompt_token_ids": [3, 1.0]}], None, "prompt 1: token id 1 must be an int, got 1.0"),
        ([IDS, {"prompt_token_ids": "abc"}], None, "prompt 1: 'prompt_token_ids' must be a list of ints, got str"),
        ([IDS, {"prompt_token_ids": [3] * 64}], None, "prompt 1: .*maximum context length is 64 tokens.*at least 64"),
        (["a", "a" * 80], None, "prompt 1: .*maximum context length is 64 tokens"),
        (["a", "\ud800"], None, "prompt 1 is not valid Unicode"),
        (["a", "b"], [GREEDY], r"lengths of prompts \(2\) and sampling_params \(1\) must be the same"),
        (["a"], [GREEDY, GREEDY], r"lengths of prompts \(1\) and sampling_params \(2\)"),
        (["a", "b"], [GREEDY, {"temperature": 0}], "1.*SamplingParams"),
        (["a"], "greedy", "SamplingParams"),
    ],
)
def test_bad_prompts_are_named_and_nothing_is_lost(
    prompts: Any, params: Any, message: str, llm: LLM, without_type_checks: None
) -> None:
    before = metrics(llm)
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert num_unfinished(llm) == 0
    assert metrics(llm)["num_requests_waiting"] == metrics(llm)["kv_cache_usage_perc"] == 0
    assert metrics(llm)["prompt_tokens"] == before["prompt_tokens"]
    (output,) = llm.generate(IDS, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n must"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
    ],
)
def test_bad_parameters_are_value_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_every_form_of_a_prompt(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode("hello")
    prompts = ["hello", {"prompt": "hello"}, {"prompt_token_ids": token_ids}]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [token_ids] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["hello", "hello", None]
    assert llm.generate(token_ids, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs


def test_a_failure_in_the_middle_takes_all_requests_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_step(llm, monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([IDS] * 5, GREEDY.clone(max_tokens=30), use_tqdm=False)
    monkeypatch.undo()
    assert num_unfinished(llm) == 0
    assert metrics(llm)["kv_cache_usage_perc"] == 0
    first, second = llm.generate([IDS] * 2, GREEDY, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 4
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_stream_takes_one_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="stream takes one prompt, got 2"):
        next(llm.stream(["a", "b"]))


def test_chat_uses_the_model_s_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert output.prompt == "<s><|user|>hello<|assistant|>"
    assert output.prompt_token_ids.count(1) == 1
    two = llm.chat([conversation, conversation], [GREEDY, GREEDY.clone(max_tokens=2)], use_tqdm=False)
    assert [len(one.outputs[0].token_ids) for one in two] == [4, 2]
    assert llm.chat(conversation, GREEDY, chat_template="{{ 'he' }}", use_tqdm=False)[0].prompt == "he"
    with pytest.raises(RequestError, match="messages must be a list"):
        llm.chat("hello")
    with pytest.raises(RequestError, match=r"prompts \(1\) and sampling_params \(2\)"):
        llm.chat(conversation, [GREEDY, GREEDY])


def test_templates_see_contents_in_the_format_asked_for(llm: LLM) -> None:
    conversation = [{"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "lo"}]}]
    shown = functools.partial(llm.chat, conversation, GREEDY, use_tqdm=False)
    plain, parts = "{{ messages[0].content }}", "{% for p in messages[0].content %}{{ p.text }}|{% endfor %}"
    assert shown(chat_template=plain)[0].prompt == "he\nlo"
    assert shown(chat_template=parts)[0].prompt == "he|lo|"
    template = "{{ messages[0].content | length }}"
    assert shown(chat_template=template, chat_template_content_format="string")[0].prompt == "5"
    assert shown(chat_template=template, chat_template_content_format="openai")[0].prompt == "2"
    with pytest.raises(RequestError, match="chat_template_content_format must be one of auto, string, openai, got 'x'"):
        shown(chat_template_content_format="x")


# ---------------------------------------------------------------- the progress bar


def test_the_progress_bar_says_what_vllm_s_does(llm: LLM) -> None:
    text = io.StringIO()
    llm.generate([IDS, "hello"], GREEDY.clone(n=3, temperature=1.0), use_tqdm=partial(tqdm, file=text))
    last = text.getvalue().split("\r")[-1]
    assert "Processed prompts: 100%" in last
    assert "6/6" in last
    assert "est. speed input:" in last
    assert "output: 0.00 toks/s" not in last


def test_the_progress_bar_can_be_left_out(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(IDS, GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""
    llm.generate(IDS, GREEDY)
    assert "Processed prompts" in capfd.readouterr().err


# ---------------------------------------------------------------- the end of an engine


def test_a_closed_engine_says_so(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **SETTINGS) as made:
        made.generate(IDS, GREEDY, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="the engine stopped: it was closed"):
        made.generate(IDS, GREEDY)


def test_closing_twice_is_without_effect(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **SETTINGS) as made:
        made.close()


# ---------------------------------------------------------------- defaults of the model


def test_default_parameters_come_from_the_model(broken: Path, tmp_path: Path, no_compiling: None) -> None:
    """Wrong ones are found before anything is compiled."""
    (broken / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature"):
        LLM(str(broken), **SETTINGS)
    (broken / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read as JSON"):
        LLM(str(broken), **SETTINGS)
    with pytest.raises(ConfigError, match="generation_config: expected 'auto', 'vllm' or a directory.*got '/nowhere'"):
        LLM(str(broken), **SETTINGS, generation_config="/nowhere")


def test_default_parameters_in_use(broken: Path, tmp_path: Path) -> None:
    (broken / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 3, "eos_token_id": 2}')
    with LLM(str(broken), **SETTINGS) as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        assert len(made.generate(IDS, use_tqdm=False)[0].outputs[0].token_ids) <= 3
        mixed = made.generate([IDS, IDS], [GREEDY.clone(ignore_eos=True), GREEDY], use_tqdm=False)
        assert len(mixed[0].outputs[0].token_ids) == 4


def test_default_parameters_of_vllm(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (broken / "generation_config.json").write_text('{"max_new_tokens": 3}')
    with LLM(str(broken), **SETTINGS, generation_config="vllm") as made:
        assert made.get_default_sampling_params() == SamplingParams()
    changes = {"temperature": 0.5, "max_new_tokens": 2}
    with LLM(str(broken), **SETTINGS, override_generation_config=changes) as made:
        assert made.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=2)
        assert len(made.generate(IDS, use_tqdm=False)[0].outputs[0].token_ids) <= 2


# ---------------------------------------------------------------- checkpoints that cannot be read


def drop(name: str, directory: Path) -> None:
    (directory / name).unlink()


def cut(num_bytes: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])


def set_bytes(start: int, data: bytes, directory: Path) -> None:
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)


def change_tensors(change: Callable[[dict[str, np.ndarray]], Any], directory: Path) -> None:
    path = directory / "model.safetensors"
    loaded = load_file(path)
    change(loaded)
    path.unlink()
    save_file(loaded, path)


def change_config(changes: dict[str, Any], directory: Path) -> None:
    raw = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps({name: raw[name] for name in raw if raw[name] != "drop"}))


def write(name: str, text: str, directory: Path) -> None:
    (directory / name).write_text(text)


BREAKS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no weights": (partial(drop, "model.safetensors"), CheckpointError, "model.safetensors"),
    "no config": (partial(drop, "config.json"), ConfigError, r"config\.json: no such file"),
    "config no JSON": (partial(write, "config.json", "{"), ConfigError, r"config\.json: expected JSON"),
    "config a list": (partial(write, "config.json", "[]"), ConfigError, "expected a JSON object, got list"),
    "config without sizes": (
        partial(change_config, {"hidden_size": "drop", "vocab_size": "drop"}),
        ConfigError,
        r"(?s)hidden_size.*vocab_size",
    ),
    "config without architecture": (
        partial(change_config, {"architectures": "drop"}),
        ConfigError,
        "architectures.*missing; supported: .*LlamaForCausalLM",
    ),
    "unknown architecture": (
        partial(change_config, {"architectures": ["MambaForCausalLM"]}),
        UnsupportedModelError,
        "MambaForCausalLM is not supported; supported: ",
    ),
    "empty file": (partial(cut, 0), CheckpointError, "not a safetensors file: only 0 bytes"),
    "cut header": (partial(cut, 100), CheckpointError, "header of .* bytes does not fit in 100 bytes"),
    "cut data": (partial(cut, -1), CheckpointError, r"model\.safetensors"),
    "header no JSON": (partial(set_bytes, 8, b"xxxx"), CheckpointError, "header is not valid JSON"),
    "missing tensor": (
        partial(change_tensors, lambda found: found.pop("lm_head.weight")),
        CheckpointError,
        r"1 missing\n.*lm_head\.weight \[288, 16\]",
    ),
    "unexpected tensor": (
        partial(change_tensors, lambda found: found.update(extra=np.zeros(2, np.float32))),
        CheckpointError,
        r"1 unexpected\n.*extra",
    ),
    "all at once": (
        partial(
            change_tensors,
            lambda found: found.update({"extra": found.pop("model.norm.weight"), "lm_head.weight": np.zeros((3, 3))}),
        ),
        CheckpointError,
        "1 missing, 1 unexpected, 1 of wrong shape",
    ),
    "integers": (
        partial(change_tensors, lambda found: found.update({"model.norm.weight": np.ones(16, np.int32)})),
        CheckpointError,
        r"model\.norm\.weight.*int32",
    ),
    "index without its files": (
        lambda path: (
            drop("model.safetensors", path),
            write("model.safetensors.index.json", '{"weight_map": {"lm_head.weight": "a.safetensors"}}', path),
        ),
        CheckpointError,
        r"lists files that do not exist: .*a\.safetensors",
    ),
    "tokenizer no JSON": (partial(write, "tokenizer.json", "{"), ConfigError, r"tokenizer\.json"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_cannot_be_read_is_found_before_compiling(name: str, broken: Path, no_compiling: None) -> None:
    damage, kind, message = BREAKS[name]
    damage(broken)
    with pytest.raises(kind, match=message) as caught:
        LLM(str(broken), **SETTINGS)
    assert isinstance(caught.value, ValueError)


def test_a_model_that_is_nowhere(no_compiling: None) -> None:
    with pytest.raises(ValueError, match="neither an existing directory nor"):
        LLM("/no/such/directory", **SETTINGS)


# ---------------------------------------------------------------- settings against the model and the machine


def test_a_layout_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    """As an object, and from a file; with a mesh instead of the sizes."""
    rules = {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor"}
    file = tmp_path / "own.py"
    file.write_text(f"from sharding import ShardingLayout\nOWN = ShardingLayout('own', {rules})\n")
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(temperature=0.0, max_tokens=6)
    found = list[list[list[int]]]()
    for settings in ({}, {"layout": ShardingLayout("own", rules)}, {"layout": f"{file}:OWN"}):
        mesh = "data=2,tensor=2" if settings else None
        with LLM(str(tiny_model), **{**SETTINGS, "mesh": mesh, **settings}) as llm:
            assert layout_name(llm) == ("own" if settings else "tensor_parallel")
            assert num_replicas(llm) == (2 if settings else 1)
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(given, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 16}, "16 devices, but JAX has 8 cpu device.*jax_num_cpu_devices"),
        ({"data_parallel_size": 9}, "9 devices, but JAX has 8"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide .*valid sizes: 1, 2, 4$"),
        (
            {"tensor_parallel_size": 2, "layout": "replicated"},
            "layout 'replicated' does not shard the model; it requires tensor_parallel_size=1, got 2",
        ),
        ({"layout": "diagonal"}, "unknown layout 'diagonal'; supported layouts: .*tensor_parallel"),
        ({"layout": 7}, "layout: expected a name, path.py:NAME or a ShardingLayout, got 7"),
        ({"layout": None}, "layout: expected a name, .*got None"),
        ({"layout": "nowhere.py:LAYOUT"}, "layout: expected an existing local Python file .*got 'nowhere.py'"),
        ({"layout": ShardingLayout("wide", {"embed": "tensor"})}, "layout 'wide' splits embed, which every device"),
        ({"layout": ShardingLayout("slices", {"ffn": "data"})}, "splits ffn over data; a layout can use only the axes"),
        (
            {"layout": ShardingLayout("two", {"vocab": "tensor"})},
            "layout 'two' splits vocab over tensor; it can be split only over the axis of ffn, None",
        ),
        (
            {"layout": ShardingLayout("one", {"q_heads": "tensor", "ffn": "tensor"})},
            "'one' has q_heads over tensor, kv_heads over None, tokens over None, ffn over tensor; q_heads, and either",
        ),
        (
            {"layout": ShardingLayout("heads", dict.fromkeys(("q_heads", "kv_heads"), "tensor"))},
            "kv_heads over tensor, .* ffn over None; .* must be over the axis of ffn, or none of them be split",
        ),
        ({"attention_backend": "flash9"}, "flash9"),
        ({"dtype": "float16"}, "dtype='float16' is not supported on CPUs"),
        ({"max_model_len": 65}, "max_model_len=65 exceeds the model's maximum of 64 positions"),
        ({"max_num_seqs": 32}, "max_num_batched_tokens=16 is less than max_num_seqs=32"),
        ({"compile_sizes": {"decode": [3]}}, r"compile_sizes\.decode: expected sizes up to max_num_seqs=2 .*got 3"),
        ({"compile_sizes": {"mixed": [8]}}, r"must hold a step of max_num_batched_tokens=16 .*add 16 to the list"),
        ({"hf_overrides": {"num_attention_heads": 5}}, "num_key_value_heads"),
        ({"tokenizer": "/nowhere/at/all"}, "neither an existing directory"),
        ({"chat_template": "/nowhere/at/all"}, "chat_template is neither a Jinja template nor a readable file"),
    ],
)
def test_settings_that_do_not_go_with_model_or_machine(
    settings: dict[str, Any], message: str, tiny_model: Path, no_compiling: None
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_model), **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("settings", "num_expected"),
    [
        pytest.param({"kernels": "xla"}, 5, marks=pytest.mark.slow),
        ({"kernels": "xla", "deterministic": True, "max_num_seqs": 16, "num_gpu_blocks_override": 200}, 5),
        ({"deterministic": True, "max_num_seqs": 64, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}, 5),
        pytest.param(
            {
                "kernels": "xla",
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
                "max_num_seqs": 4,
            },
            10,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compile_sizes_compile_fewer_programs_for_the_same_answers(
    settings: dict[str, Any],
    num_expected: int,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two steps, two samplers and a scorer; also where more rows decode at once than the largest decode size has.

    Native kernels compile few shapes by default, which are more than two from 64 rows on.
    """
    settings = {**SETTINGS, "max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    params = [GREEDY.clone(max_tokens=12, logprobs=2), GREEDY.clone(temperature=0.9, seed=5, max_tokens=15)] * 8
    prompts = [{"prompt_token_ids": [5, 7, 9, i, 6][i % 3 :]} for i in range(16)]
    compiled = count_compiled(monkeypatch)

    def answers(**more: Any) -> Any:
        compiled.clear()
        caplog.clear()
        with LLM(str(tiny_model), **settings, **more) as made:
            outputs = made.generate(prompts, params, use_tqdm=False)
            (scored,) = made.generate([IDS], GREEDY.clone(prompt_logprobs=1), use_tqdm=False)
            assert metrics(made)["compiles_after_ready"] == 0
        assert scored.prompt_logprobs is not None
        return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs], scored.outputs[0].token_ids

    caplog.set_level(logging.INFO)
    (expected, scored), num_default = answers(), len(compiled)
    decoded = watch_programs(monkeypatch)
    sizes = {"mixed": [settings["max_num_batched_tokens"]], "decode": [2]}
    (found, found_scored), num_given = answers(compile_sizes=sizes), len(compiled)
    num_slices = settings.get("data_parallel_size", 1)
    assert num_given == num_expected + 2 * num_slices < num_default, "two small programs for each slice"
    assert f"; {num_expected // num_slices} programs" in caplog.text
    largest = 8 if "deterministic" in settings else 2
    assert {is_decode for is_decode, rows in decoded if rows > largest} == {False}
    assert True in {is_decode for is_decode, rows in decoded if 0 < rows <= largest}
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert found_scored == scored
    if "deterministic" in settings:
        assert found == expected, "the same bits"


HEADS: dict[str, Any] = {"num_attention_heads": 128, "num_key_value_heads": 1, "head_dim": 64}


@pytest.mark.parametrize(("size", "heads"), [(1, (4, 2)), (2, (2, 1)), (4, (1, 1))])
def test_kernels_are_chosen_for_the_heads_of_a_device(
    size: int, heads: tuple[int, int], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = watch_kernel_sizes(monkeypatch)
    plan_only(tiny_model, **SETTINGS, tensor_parallel_size=size)
    (sizes,) = asked
    assert (sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"], sizes["page_size"]) == (*heads, 6, 8)


def test_a_backend_that_cannot_share_kv_heads_so_often_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By name with the reason; without a name the next backend is taken. The device is said to be a Hopper."""
    pretend_to_plan_for_a_hopper(monkeypatch)
    caplog.set_level(logging.INFO)
    settings = {**SETTINGS, "block_size": 64, "kernels": None, "attention_backend": None, "hf_overrides": HEADS}
    fits = {**settings, "hf_overrides": {**HEADS, "num_key_value_heads": 2}}
    with pytest.raises(
        UnsupportedKernelError, match="num_heads=128, num_kv_heads=1 .*mosaic: 128 query heads share a key"
    ):
        plan_only(tiny_model, **{**settings, "attention_backend": "mosaic"})
    assert planned_kernel(tiny_model, **settings) == "xla"
    assert "not mosaic: 128 query heads share a key/value head" in caplog.text
    for size in (1, 2):
        assert planned_kernel(tiny_model, **fits, tensor_parallel_size=size) == "mosaic"


@pytest.mark.parametrize(
    ("kind", "settings", "num_runs"),
    [
        (LLM, {"data_parallel_size": 2}, 2),
        (LLM, {"warm_up": False}, 0),
        (AsyncLLM, {}, 1),
        (AsyncLLM, {"warm_up": False}, 0),
    ],
)
def test_engines_warm_up(
    kind: Any, settings: dict[str, Any], num_runs: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = watch_warm_ups(monkeypatch)
    made = kind(str(tiny_model), **SETTINGS, **settings)
    (made.shutdown if kind is AsyncLLM else made.close)()
    assert len(set(warmed)) == len(warmed) == num_runs


def test_remote_code_is_accepted_with_a_warning(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(tiny_model), **SETTINGS, trust_remote_code=True):
        assert (
            "trust_remote_code=True has no effect: jaxserve never runs Python files that come with a model"
            in caplog.text
        )


def test_a_model_without_a_tokenizer_takes_token_ids(broken: Path) -> None:
    drop("tokenizer.json", broken)
    drop("tokenizer_config.json", broken)
    with LLM(str(broken), **SETTINGS) as made:
        (output,) = made.generate(IDS, GREEDY, use_tqdm=False)
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 4
        with pytest.raises(RequestError, match="prompt 0: the model directory has no tokenizer"):
            made.generate("hello", GREEDY)
        with pytest.raises(RequestError, match="prompt 0: stop strings require a tokenizer"):
            made.generate(IDS, GREEDY.clone(stop="a"))
        with pytest.raises(RequestError, match="has no tokenizer"):
            made.get_tokenizer()
        with pytest.raises(RequestError, match="has no tokenizer"):
            made.chat([{"role": "user", "content": "hello"}])


def test_a_prompt_that_becomes_no_tokens(broken: Path) -> None:
    """This tokenizer, unlike the usual one of the model, puts nothing in front of a text."""
    raw = json.loads((broken / "tokenizer.json").read_text())
    (broken / "tokenizer.json").write_text(json.dumps({**raw, "post_processor": None}))
    drop("tokenizer_config.json", broken)
    with LLM(str(broken), **SETTINGS) as made:
        with pytest.raises(RequestError, match="prompt 1: the prompt is empty after tokenization"):
            made.generate(["he", ""], GREEDY)
        with pytest.raises(RequestError, match="chat template"):
            made.chat([{"role": "user", "content": "he"}])
        assert num_unfinished(made) == 0


def test_wrong_types_of_settings_come_first(tiny_model: Path, without_type_checks: None) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: expected an integer"):
        LLM(str(tiny_model), max_num_seqs="4")
    with pytest.raises(ConfigError, match="model: expected str, got None"):
        LLM(None)  # pyright: ignore[reportArgumentType]
