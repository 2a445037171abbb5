"""Texts that are certainly too long are refused by their length, before they are tokenized; others never are."""

import asyncio
import random
import sys
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from jaxserve import RequestError, SamplingParams
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.rendering import RenderedChat
from jaxserve.api.request import Request
from jaxserve.api.text_bound import TextBound, check_text
from jaxserve.api.turns import Turn
from jaxserve.engine.admission import Admission
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo, ToEngine
from jaxserve.text.text_bounds import fast_bound
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.conftest import byte_fallback_tokenizer, byte_level_tokenizer
from tests.observed_engine import ANYBODY, make_frontend

PIECES = [" ", "  ", "\n", "\t", "\u3000", "a", "é", "e\u0301", "\u1100\u1161\u11a8", "\u212a", "\u1f82", "\U0001f600"]


def hostile_texts(tokenizer: Tokenizer, seed: int = 0) -> list[str]:
    """Texts that have few tokens for their length, if any has."""
    found = [piece * 300 for piece in PIECES]
    ids = range(tokenizer.vocab_size)
    longest = max((tokenizer.token_text(token) for token in ids), key=len)
    special = [tokenizer.token_text(token) for token in sorted(tokenizer.all_special_ids)[:3]]
    generator = random.Random(seed)
    mixed = [*PIECES, longest, *special]
    found += [longest * 40, *(" " * 400 + text + " " * 400 for text in special)]
    return found + ["".join(generator.choices(mixed, k=200)) for _ in range(20)]


def check_bound(tokenizer: Tokenizer) -> TextBound:
    """The bound of a tokenizer, which no text breaks."""
    bound = tokenizer.text_bound
    assert bound is not None
    for text in hostile_texts(tokenizer):
        assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), ascii(text)
    return bound


def test_no_text_breaks_the_bound(tiny_tokenizers: Mapping[str, Tokenizer]) -> None:
    assert check_bound(tiny_tokenizers["byte-level"]) == TextBound(len("<|end|>"))
    assert check_bound(tiny_tokenizers["byte-fallback"]) == TextBound(len("<|assistant|>"))
    assert tiny_tokenizers["words"].text_bound is None  # an unknown word of any length is one token


@pytest.mark.parametrize("name", ["llama2", "llama2-model-only", "pythia", "phi3", "gpt2", "mistral-v3"])
def test_no_text_breaks_the_bound_of_real_tokenizers(name: str, real_tokenizer: Callable[[str], Tokenizer]) -> None:
    bound = check_bound(real_tokenizer(name))
    assert bound.bytes_per_token <= 9 * 512
    assert bound.counts_space == (name != "phi3")  # its special tokens take white space with them


def test_composing_makes_one_byte_of_nine_at_most() -> None:
    """Each of Unicode's characters, decomposed and composed: neither step makes one byte of more than three."""
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000 and not unicodedata.is_normalized("NFD", character := chr(code)):
            size = len(character.encode())
            apart = unicodedata.normalize("NFD", character)
            assert size <= 3 * len(apart.encode())
            assert len(apart.encode()) <= 3 * len(unicodedata.normalize("NFC", character).encode())


def changed(**parts: Any) -> FastTokenizer:
    """The byte-level tokenizer with another part."""
    made = byte_level_tokenizer()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def after(first: Any) -> Any:
    """Splits, then bytes."""
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel()])


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.Replace("aa", "a")),
        changed(normalizer=normalizers.Replace("a", " ")),
        changed(pre_tokenizer=after(pre_tokenizers.WhitespaceSplit())),
        changed(pre_tokenizer=after(pre_tokenizers.Split(" ", "removed"))),
        changed(pre_tokenizer=None),  # characters without a token vanish
        FastTokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
        FastTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    ],
    ids=lambda tokenizer: str(tokenizer.normalizer or tokenizer.pre_tokenizer)[:30],
)
def test_tokenizers_that_remove_text_have_no_bound(tokenizer: FastTokenizer) -> None:
    assert fast_bound(tokenizer) is None


def test_what_normalizers_add_counts_and_white_space_may_not() -> None:
    composing = changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "bb")]))
    assert fast_bound(composing) == TextBound(9 * len("<|end|>"))
    greedy = byte_fallback_tokenizer()
    greedy.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    bound = fast_bound(greedy)
    assert bound is not None and bound == TextBound(len("<|assistant|>"), counts_space=False)
    assert bound.least_tokens("<|end|>" + " \n" * 1000) == 1


TEXT = "a" * (4 << 20)


def unread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Admission:
    """Admission to a context of 1,000 tokens, with a tokenizer that must not read anything."""

    def encode(*arguments: Any) -> list[int]:
        raise AssertionError(f"tokenized {len(arguments[1])} characters")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    return Admission(ModelLimits(max_model_len=1000, vocab_size=300, eos_token_ids=(0,)), tokenizer, None)


@pytest.mark.parametrize("pooling", [None, PoolingParams()])
def test_long_texts_are_refused_before_they_are_tokenized(
    tiny_tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, pooling: PoolingParams | None
) -> None:
    admission = unread(tiny_tokenizers["byte-level"], monkeypatch)
    request = Request(request_id="one", text=TEXT, pooling=pooling)
    with pytest.raises(RequestError, match="your prompt contains at least 599187 input tokens") as caught:
        admission.admit(request, default_seed=1, arrival_s=0.0)
    assert (caught.value.parameter, caught.value.value) == ("input_tokens", 599187)


@pytest.mark.parametrize(
    ("characters", "fields", "is_refused"),
    [
        (7 * 999, {}, False),
        (7 * 999 + 1, {}, True),
        (7 * 1000, {"pooling": PoolingParams()}, False),
        (7 * 990, {"params": SamplingParams(max_tokens=10), "is_strict_length": True}, False),
        (7 * 990 + 1, {"params": SamplingParams(max_tokens=10), "is_strict_length": True}, True),
        (1 << 20, {"truncate_prompt_tokens": 5}, False),
        (1 << 20, {"token_ids": (1,)}, False),
    ],
)
def test_what_may_fit_is_tokenized(characters: int, fields: dict[str, Any], is_refused: bool) -> None:
    request = Request(text="a" * characters, **fields)
    if not is_refused:
        check_text(TextBound(7), request, 1000)
        return
    with pytest.raises(RequestError, match="maximum context length is 1000 tokens"):
        check_text(TextBound(7), request, 1000)


class Sending(EngineClient):
    """A client of an engine that is told nothing."""

    def __init__(self, rendered: str):
        super().__init__({}, ServerConfig())
        self.rendered, self.sent = rendered, list[ToEngine]()

    @property
    def info(self) -> EngineInfo:
        """A model with a context of 1,000 tokens."""
        return INFO

    def _take_number(self) -> int:
        return 1

    async def _render(self, chat: Mapping[str, Any], turn: Turn, *request: Any) -> RenderedChat:
        return RenderedChat(self.rendered, None)

    def _send(self, message: ToEngine) -> None:
        self.sent.append(message)


INFO = EngineInfo(model_pb2.Model(max_model_len=1000), {}, text_bound=TextBound(7))


def test_long_texts_do_not_leave_the_front_end() -> None:
    """Neither those of clients, nor conversations once they are rendered."""
    engine = Sending(TEXT)
    frontend = make_frontend(cast("Any", engine))
    with pytest.raises(RequestError, match="at least 599187 input tokens"):
        frontend.entry(ANYBODY, Request(request_id="one", text=TEXT))
    chat = Request(request_id="two", chat={"messages": [{"role": "user", "content": "a"}]})

    async def run() -> None:
        async for _ in engine.generate(chat):
            pass

    with pytest.raises(RequestError, match="at least 599187 input tokens"):
        asyncio.run(run())
    assert not engine.sent
