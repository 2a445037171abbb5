"""Ids against published references, chat templates against transformers, and directories that don't work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

REFERENCES = (
    "baichuan-7b",
    "deepseek-r1",
    "gpt2",
    "granite-3.1",
    "llama2",
    "llama2-model-only",
    "phi3",
    "pythia",
    "qwen",
)
MISTRAL = ("mistral-v1", "mistral-v2", "mistral-v3", "mistral-v7")
GGML_OF = {"llama2-model-only": "llama-spm", "llama2": "llama-spm", "gpt2": "gpt-2", "qwen": "qwen2", "phi3": "phi-3"}


@pytest.mark.parametrize("name", REFERENCES + MISTRAL)
def test_reference_encodings(name: str, real_tokenizer: Callable[[str], Tokenizer], shared_data: Path) -> None:
    path = shared_data / "tokenizers" / "expected" / f"{name.removesuffix('-model-only')}.json"
    cases, tokenizer = json.loads(path.read_text())["cases"], real_tokenizer(name)
    assert len(cases) >= 54
    for case in cases:
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"], case["text"]


@pytest.mark.parametrize("name", sorted(GGML_OF))
def test_llama_cpp_encodings(name: str, real_tokenizer: Callable[[str], Tokenizer], shared_data: Path) -> None:
    stem = shared_data / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{GGML_OF[name]}.gguf"
    mark = "\n__ggml_vocab_test__\n"
    texts = Path(f"{stem}.inp").read_bytes().decode().removesuffix(mark).split(mark)
    lines = Path(f"{stem}.out").read_text(encoding="utf-8").splitlines()
    tokenizer = real_tokenizer(name)
    assert len(texts) == len(lines) == 46
    for text, line in zip(texts, lines, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == [int(word) for word in line.split()], text


def test_baichuan_from_a_sentencepiece_model_alone(real_directory: Callable[[str], Path], shared_data: Path) -> None:
    """The published ids of the original model, with and without its config.json beside the vocabulary."""
    directory = real_directory("baichuan-7b")
    case = json.loads((shared_data / "tokenizers/expected/baichuan-7b.json").read_text())["cases"][-1]
    assert sorted(path.name for path in directory.iterdir()) == ["tokenizer.model"]
    assert load_tokenizer(directory).encode(case["text"]) == case["ids"]


def test_baichuan_with_its_config(real_directory: Callable[[str], Path], shared_data: Path, tmp_path: Path) -> None:
    case = json.loads((shared_data / "tokenizers/expected/baichuan-7b.json").read_text())["cases"][-1]
    shutil.copy(real_directory("baichuan-7b") / "tokenizer.model", tmp_path)
    shutil.copy(shared_data / "configs/baichuan-7b/config.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size, tokenizer.hf) == (1, 2, 64000, None)


@pytest.mark.parametrize("files", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.model", "config.json"]])
def test_stories_prompts(stories_model: Path, tmp_path: Path, files: list[str]) -> None:
    for file in files:
        shutil.copy(stories_model / file, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for case in json.loads((stories_model / "expected.json").read_text())["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["greedy_ids"]) == case["text"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.all_special_ids) == (1, 2, {0, 1, 2})


@pytest.mark.parametrize("name", ["llama2-model-only", "baichuan-7b", "mistral-v3"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(data=st.data())
def test_sentencepiece_decode(
    name: str,
    real_tokenizer: Callable[[str], Tokenizer],
    real_directory: Callable[[str], Path],
    data: st.DataObject,
) -> None:
    """Our joining of pieces against the library's, for any ids that are not special."""
    tokenizer = real_tokenizer(name)
    library = sentencepiece.SentencePieceProcessor(model_file=str(real_directory(name) / "tokenizer.model"))
    any_id = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.integers(0, 1200))
    token_ids = data.draw(st.lists(any_id, max_size=20))
    plain = [token_id for token_id in token_ids if token_id not in tokenizer.all_special_ids]
    assert tokenizer.decode(token_ids) == library.decode(plain)


def test_special_tokens_in_text_agree_between_both_forms(real_tokenizer: Callable[[str], Tokenizer]) -> None:
    """Phi-3's tokenizer.json has Llama 2's vocabulary, and its text after a special token has a prefix again."""
    text = "<s>[INST] Hi  there [/INST] Hello <s><s>[INST]x[/INST]\n<s>"
    by_model = real_tokenizer("llama2-model-only").encode(text, add_special_tokens=False)
    assert by_model == real_tokenizer("phi3").encode(text, add_special_tokens=False)
    assert by_model.count(1) == 4


def test_without_legacy_text_after_a_special_token_has_no_prefix(
    real_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(real_directory("llama2-model-only") / "tokenizer.model", tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    hello, plain_hello = tokenizer.token_to_id("▁Hello"), tokenizer.token_to_id("Hello")
    assert tokenizer.encode("Hello") == [1, hello, 2]
    assert tokenizer.encode("Hello</s>Hello") == [1, hello, 2, plain_hello, 2]


def test_added_tokens_beside_a_sentencepiece_model(real_directory: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(real_directory("llama2-model-only") / "tokenizer.model", tmp_path)
    added = {
        "32000": {"content": "<|user|>", "special": True, "rstrip": True},
        "32001": {"content": "<|user|>!", "special": False},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 32002
    assert tokenizer.encode("a<|user|>  b<|user|>!") == [263, 32000, 289, 32001]
    assert tokenizer.decode([263, 32000, 289, 32001]) == "a b<|user|>!"
    assert tokenizer.decode([263, 32000, 289, 32001], skip_special_tokens=False) == "a<|user|> b<|user|>!"
    assert (tokenizer.token_to_id("<|user|>"), tokenizer.token_to_id("nowhere")) == (32000, None)


def test_token_text_keeps_spaces_and_shows_special_tokens(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-fallback"]
    ids = {token: tokenizer.token_to_id(token) for token in ("▁a", "</s>", "<0xC3>", "<0x41>")}
    shown = {token: tokenizer.token_text(token_id) for token, token_id in ids.items() if token_id is not None}
    assert shown == {"▁a": " a", "</s>": "</s>", "<0xC3>": "\ufffd", "<0x41>": "A"}
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize(("name", "token"), [("byte-fallback", "<0xC3>"), ("byte-level", "Ġ")])
def test_tokens_are_spelt_as_in_the_vocabulary(tiny_tokenizers: dict[str, Tokenizer], name: str, token: str) -> None:
    tokenizer = tiny_tokenizers[name]
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    assert tokenizer.id_to_token(token_id) == token
    assert tokenizer.id_to_token(10**6) is None


def test_encode_adds_bos_when_asked(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-fallback"]
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.encode_batch(["a", ""]) == [tokenizer.encode("a"), tokenizer.encode("")]
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_truncation_and_padding_of_the_file_are_off(tiny_directory: Path, tmp_path: Path) -> None:
    saved = tokenizers.Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("hello hello hello")) > 8
    assert len(load_tokenizer(tmp_path).encode("a")) < 4


# ------------------------------------------------------------------------------------------------ transformers


def test_the_transformers_tokenizer_agrees(tiny_directory: Path) -> None:
    plain, through = load_tokenizer(tiny_directory), load_tokenizer(tiny_directory, "hf")
    text = "hello <|user|>a é"
    assert plain.hf(text)["input_ids"] == through.hf(text)["input_ids"] == plain.encode(text) == through.encode(text)
    assert plain.hf is plain.hf


def test_a_token_that_only_the_config_names_is_added(tiny_directory: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_directory / "tokenizer.json", tmp_path)
    config = {"eos_token": "<|stop|>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == tokenizer.hf.eos_token_id == tokenizer.vocab_size - 1
    assert tokenizer.eos_token_id in tokenizer.all_special_ids


def test_special_tokens_of_a_transformers_class(real_tokenizer: Callable[[str], Tokenizer]) -> None:
    assert real_tokenizer("gpt2").eos_token_id == 50256


CONVERSATIONS = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2+2?"},
    ],
)


def test_chat_ids_of_qwen(real_tokenizer: Callable[[str], Tokenizer]) -> None:
    tokenizer = real_tokenizer("qwen")
    for conversation in CONVERSATIONS:
        wanted = tokenizer.hf.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert tokenizer.apply_chat_template(conversation) == wanted
    wanted = tokenizer.hf.apply_chat_template(
        CONVERSATIONS[0], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert tokenizer.apply_chat_template(CONVERSATIONS[0], enable_thinking=False) == wanted


def test_published_templates_render_as_in_transformers(
    real_tokenizer: Callable[[str], Tokenizer], shared_data: Path
) -> None:
    tokenizer = real_tokenizer("llama2")
    templates = sorted((shared_data / "configs/chat-templates").rglob("*.jinja"))
    assert len(templates) > 30
    num_same = 0
    for path in templates:
        for conversation in CONVERSATIONS:
            try:
                wanted = tokenizer.hf.apply_chat_template(
                    conversation, chat_template=path.read_text(), add_generation_prompt=True, tokenize=False
                )
            except Exception:
                with pytest.raises(RequestError, match="the chat template failed"):
                    tokenizer.render_chat(conversation, str(path))
            else:
                assert tokenizer.render_chat(conversation, str(path)) == wanted, path.name
                num_same += 1
    assert num_same > 50


# ------------------------------------------------------------------------------------------------ chat


def test_chat_has_one_bos(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-fallback"]
    conversation = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(conversation) == "<s><|user|>a<|assistant|>"
    ids = tokenizer.apply_chat_template(conversation)
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert ids[-1] == tokenizer.token_to_id("<|assistant|>")


def test_chat_options(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-fallback"]
    conversation = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer.render_chat(conversation, add_generation_prompt=False) == "<s><|user|>a\nb"
    assert tokenizer.render_chat(conversation, "{{ word }}", word="x") == "x"
    opened = [*conversation, {"role": "assistant", "content": "he"}]
    rendered = tokenizer.render_chat(opened, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "<s><|user|>a\nb<|assistant|>he"
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert tokenizer.render_chat(conversation, "{{ tools[0].function.name }}", tools=tools) == "add"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list, got str"),
        ([], "messages must have at least one message"),
        (["Hi"], r"messages\[0\] must be an object with a role, got 'Hi'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\].role must be a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of type 'image_url' are not supported"),
    ],
)
def test_bad_messages(tiny_tokenizers: dict[str, Tokenizer], messages: list, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer = tiny_tokenizers["byte-fallback"]
        tokenizer.apply_chat_template(messages)


def test_chat_errors(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    conversation = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="the model has no chat template: pass chat_template"):
        tiny_tokenizers["byte-level"].apply_chat_template(conversation)
    tokenizer = tiny_tokenizers["byte-fallback"]
    with pytest.raises(RequestError, match="the chat template failed: only two"):
        tokenizer.render_chat(conversation, "{{ raise_exception('only two') }}")
    with pytest.raises(RequestError, match="the chat template failed"):
        tokenizer.render_chat(conversation, "{% if %}")
    with pytest.raises(RequestError, match="continue_final_message=True requires add_generation_prompt=False"):
        tokenizer.render_chat(conversation, continue_final_message=True)
    with pytest.raises(RequestError, match="neither a Jinja template nor a readable file"):
        tokenizer.render_chat(conversation, "/nowhere.jinja")


def test_where_chat_templates_come_from(tiny_directory: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_directory / "tokenizer.json", tmp_path)
    conversation = [{"role": "user", "content": "a"}]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'json' }}"}))
    assert load_tokenizer(tmp_path).render_chat(conversation) == "json"
    listed = [{"name": "default", "template": "{{ 'one' }}"}, {"name": "tool_use", "template": "{{ 'tools' }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert load_tokenizer(tmp_path).render_chat(conversation) == "one"
    assert load_tokenizer(tmp_path).render_chat(conversation, tools=[{}]) == "tools"
    assert load_tokenizer(tmp_path).render_chat(conversation, "tool_use") == "tools"
    (tmp_path / "chat_template.jinja").write_text("{{ 'file' }}")
    assert load_tokenizer(tmp_path).render_chat(conversation) == "file"


# ------------------------------------------------------------------------------------------------ bad directories


@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_tiktoken_ranks_are_refused(shared_data: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"tiktoken rank file .* put the model's tokenizer.json beside it"):
        load_tokenizer(shared_data / "tokenizers" / name)


def test_directories_that_hold_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="has no tokenizer: tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, or"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="tokenizer_mode must be one of"):
        load_tokenizer(tmp_path, "quick")


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read as a tokenizer"),
        ("tokenizer.model", "garbage", "tokenizer.model is not a sentencepiece model"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must be a JSON object, got list"),
        ("tokenizer_config.json", '{"eos_token": 3}', "a special token must be a string or an object"),
        ("vocab.json", "{}", "transformers cannot load a tokenizer"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, contents: str, message: str) -> None:
    (tmp_path / file).write_text(contents)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_a_decoder_that_cannot_go_token_by_token_is_refused(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"decoder .*WordPiece.* is not supported: it must be ByteLevel"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_long_texts_are_encoded_as_short_ones(tiny_tokenizers: dict[str, Tokenizer], name: str) -> None:
    """Long ones go another way, on which other threads run meanwhile."""
    tokenizer = tiny_tokenizers[name]
    piece = "hello a bed! "
    alone = tokenizer.encode(piece, add_special_tokens=False)
    long = tokenizer.encode(piece * 1000, add_special_tokens=False)
    assert long[: len(alone) - 1] == alone[:-1]
    assert long == tokenizer.encode_batch([piece * 1000], add_special_tokens=False)[0]
    assert tokenizer.decode(long) == tokenizer.decode(tokenizer.encode_batch([piece * 1000], False)[0])


# ------------------------------------------------------------------------------------------------ add_bos_token


def flagged(
    tiny_directory: Path, directory: Path, post_processor: processors.PostProcessor | None, **flags: bool
) -> Path:
    """A directory whose tokenizer_config.json says which tokens to add and whose tokenizer.json does otherwise."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_directory / "tokenizer.json"))
    tokenizer.post_processor = post_processor
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((tiny_directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
    return directory


BOS_ALONE = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
FLAGS = {
    "neither": (None, {}, [], []),
    "bos": (None, {"add_bos_token": True, "add_eos_token": False}, [1], []),
    "bos beside a post-processor that adds none": (processors.ByteLevel(), {"add_bos_token": True}, [1], []),
    "bos that the file adds": (BOS_ALONE, {"add_bos_token": True}, [1], []),
    "both, of which the file adds one": (BOS_ALONE, {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    "eos": (None, {"add_eos_token": True}, [], [2]),
    "off, as in transformers 5": (BOS_ALONE, {"add_bos_token": False}, [1], []),
}


@pytest.mark.parametrize("mode", ["auto", "hf"])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_the_config_add_what_the_tokenizer_does_not(
    name: str, mode: str, tiny_directory: Path, tmp_path: Path
) -> None:
    post_processor, flags, before, after = FLAGS[name]
    tokenizer = load_tokenizer(flagged(tiny_directory, tmp_path, post_processor, **flags), mode)
    for text in ("hello", "", "hello" * 600):
        plain = tokenizer.encode(text, add_special_tokens=False)
        assert not set(plain) & {1, 2}
        assert tokenizer.encode(text) == tokenizer.encode_batch([text])[0] == [*before, *plain, *after]
        assert tokenizer.hf(text)["input_ids"] == [*before, *plain, *after], "get_tokenizer() gives the same ids"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert chat.count(1) == 1 and chat.count(2) == 0, "the template writes its own"


def test_a_flag_without_its_token_is_said(
    tiny_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = flagged(tiny_directory, tmp_path, None, add_bos_token=True)
    (directory / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": null}')
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    assert "add_bos_token: true but no bos_token in the vocabulary: none is added" in caplog.text


def test_deepseek_has_one_bos(real_tokenizer: Callable[[str], Tokenizer]) -> None:
    tokenizer = real_tokenizer("deepseek-r1")
    assert tokenizer.encode("Hi") == [0, *tokenizer.encode("Hi", add_special_tokens=False)]


def test_slow_reads_the_sentencepiece_model(real_directory: Callable[[str], Path], tmp_path: Path) -> None:
    for directory in (real_directory("llama2"), real_directory("llama2-model-only")):
        shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    slow, fast = load_tokenizer(tmp_path, "slow"), load_tokenizer(tmp_path)
    assert slow.hf is None and fast.hf is not None, "the library is sentencepiece"
    assert slow.encode("Hello  world") == fast.encode("Hello  world")


def test_slow_without_a_sentencepiece_model_is_transformers(tiny_directory: Path) -> None:
    assert load_tokenizer(tiny_directory, "slow").encode("hello") == load_tokenizer(tiny_directory).encode("hello")
