"""The bytes and the offsets of tokens in logprobs, against the text that the tokens make."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from jaxserve.api.outputs import CompletionOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_checks import RequestOutputKind
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.sampling.logprobs import TokenLogprobs
from jaxserve.scheduling.sequence import Sequence
from jaxserve.server.http_api.logprobs import chat_logprobs, completion_logprobs
from jaxserve.server.proto_codec import completion_from_proto, completion_to_proto
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.text_offsets import TextOffsets, prompt_offsets
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.jaxserve.conftest import byte_level_tokenizer

KINDS = ("byte-level", "byte-fallback", "words")
BYTE_LEVEL, BYTE_FALLBACK, WORDS = KINDS


def scores() -> TokenLogprobs:
    """Of one token, without others."""
    none = np.zeros((1, 0))
    one: Any = np.zeros(1)
    return TokenLogprobs(one, one + 1, top_ids=none, top=none, tracked=none)  # pyright: ignore[reportArgumentType]


def generate(tokenizer: Tokenizer, token_ids: list[int], stop_ids: set[int], **fields: Any) -> list[CompletionOutput]:
    """The deltas of a request that samples these tokens, after a prompt of one token without text."""
    params = SamplingParams(logprobs=0, output_kind=RequestOutputKind.DELTA, **fields)
    prompt = [0]
    asked = Request(request_id="0", params=params)
    sequence = Sequence(asked, list(prompt), 1, 1000, stop_ids=dict.fromkeys(stop_ids))
    pieces = tokenizer.pieces(params.skip_special_tokens)
    sample = Sample(sequence, Detokenizer(pieces, prompt_token_ids=prompt), [], TextOffsets(pieces, prompt))
    request = RequestState(asked, prompt, [sample], 1.0, 2.0, tokenizer)
    found: list[CompletionOutput] = []
    for index, token in enumerate(token_ids):
        sequence.token_ids.append(token)
        if token in stop_ids or index == len(token_ids) - 1:
            sequence.finish_reason = "stop" if token in stop_ids else "length"
        sample.score(0, scores())
        output = request.next_output()
        assert output is not None
        found += output.outputs
        if sequence.finish_reason is not None:
            break
    return found


def joined(deltas: list[CompletionOutput]) -> CompletionOutput:
    """The completion that deltas make, after a way over the wire."""
    whole = CompletionOutput(0, "", [], cumulative_logprob=0.0, logprobs=[])
    for delta in deltas:
        whole.extend(completion_from_proto(completion_to_proto(delta)))
    return whole


def check(deltas: list[CompletionOutput], tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
    """Offsets and bytes of the deltas, and of the whole, are those of the text."""
    whole = joined(deltas)
    assert whole.logprobs is not None
    entries = chat_logprobs(whole.token_ids, whole.logprobs, num_top=0)["content"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    try:
        assert raw.decode() == whole.text
    except UnicodeDecodeError:
        assert "\ufffd" in whole.text
    plain = completion_logprobs(whole.token_ids, whole.logprobs, begin=3)
    as_ids = completion_logprobs(whole.token_ids, whole.logprobs, begin=3, as_ids=True)
    assert as_ids["text_offset"] == plain["text_offset"]
    assert as_ids["tokens"] == [f"token_id:{token}" for token in whole.token_ids]
    ids = chat_logprobs(whole.token_ids, whole.logprobs, num_top=0, as_ids=True)["content"]
    assert [entry["bytes"] for entry in ids] == [entry["bytes"] for entry in entries]
    streamed = [completion_logprobs(one.token_ids, one.logprobs or [], begin=3)["text_offset"] for one in deltas]
    assert sum(streamed, []) == plain["text_offset"]
    offsets = [offset - 3 for offset in plain["text_offset"]]
    assert offsets == sorted(offsets) and all(0 <= offset <= len(whole.text) for offset in offsets)
    pieces = tokenizer.pieces(skip_special_tokens)
    for token, offset in zip(whole.token_ids, offsets, strict=True):
        piece = pieces[token]
        if piece and not (offset == 0 and piece[0] == " ") and token != whole.token_ids[-1]:
            assert whole.text.startswith(piece, offset), (token, offset)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skips=st.booleans())
def test_offsets_and_bytes_are_those_of_the_text(
    tiny_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, skips: bool
) -> None:
    tokenizer = tiny_tokenizers[kind]
    likely = [token for token in range(tokenizer.vocab_size) if (tokenizer.pieces()[token] or "x")[0] == " "] or [0]
    token = st.integers(0, tokenizer.vocab_size) | st.sampled_from(likely)
    token_ids = data.draw(st.lists(token, min_size=1, max_size=12))
    if data.draw(st.booleans()) and kind != WORDS:
        text = data.draw(st.text("aé你😀 h", max_size=5))
        token_ids += tokenizer.encode(text, add_special_tokens=False)
    stop_ids = data.draw(st.sampled_from([set[int](), {token_ids[-1]}]))
    check(generate(tokenizer, token_ids, stop_ids, skip_special_tokens=skips), tokenizer, skips)


def test_a_character_of_several_tokens(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """Each token has its own bytes, and the offset of the character that it is a part of."""
    for kind in (BYTE_LEVEL, BYTE_FALLBACK):
        tokenizer = tiny_tokenizers[kind]
        token_ids = tokenizer.encode("a😀你b", add_special_tokens=False)
        whole = joined(generate(tokenizer, token_ids, set()))
        assert whole.logprobs is not None
        entries = chat_logprobs(whole.token_ids, whole.logprobs, num_top=0)["content"]
        assert sum((entry["bytes"] for entry in entries), []) == list(whole.text.encode())
        found = completion_logprobs(whole.token_ids, whole.logprobs)
        first = whole.text.index("a")
        expected = {"b": first + 3, "😀": first + 1, "你": first + 2}
        assert found["text_offset"][-1] == expected["b"]
        assert {*found["text_offset"]} >= {*expected.values()}
        assert found["text_offset"].count(expected["你"]) == 3


def test_tokens_that_the_text_leaves_out_have_no_bytes(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    """Special tokens, unless they are kept, and a final stop token, whatever its text."""
    tokenizer = tiny_tokenizers[BYTE_LEVEL]
    (end,) = tokenizer.encode("<|end|>")
    a, b = tokenizer.encode("ab")
    for stop_ids, skips, expected in (
        (set[int](), True, [[97], [], [98]]),
        (set[int](), False, [[97], [*b"<|end|>"], [98]]),
        ({b}, True, [[97], [], []]),
        ({end}, False, [[97], []]),
    ):
        whole = joined(generate(tokenizer, [a, end, b], stop_ids, skip_special_tokens=skips))
        assert whole.logprobs is not None
        entries = chat_logprobs(whole.token_ids, whole.logprobs, num_top=0)["content"]
        assert [entry["bytes"] for entry in entries] == expected
        assert [entry["token"] for entry in entries] == ["a", "<|end|>", "b"][: len(expected)]


@example(kind=BYTE_FALLBACK, text="aé你😀 b")
@example(kind=BYTE_LEVEL, text="<|end|>a")
@given(kind=st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]), text=st.text("ahé你😀", min_size=1, max_size=8))
def test_offsets_in_a_prompt(tiny_tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    """BOS is no part of a text, but of the text that token ids stand for."""
    tokenizer = tiny_tokenizers[kind]
    token_ids = tokenizer.encode(text)
    added = len(token_ids) - len(tokenizer.encode(text, add_special_tokens=False))
    pieces = tokenizer.pieces(skip_special_tokens=False)
    for given_text, shown in ((text, text), (None, tokenizer.decode(token_ids, skip_special_tokens=False))):
        offsets = prompt_offsets(tokenizer, given_text, token_ids)
        assert len(offsets) == len(token_ids)
        assert offsets[added] == (0 if given_text else len("<s>") * added)
        for token, offset in [*zip(token_ids, offsets, strict=True)][added + 1 :]:
            piece = pieces[token]
            assert not piece or shown.startswith(piece, offset)
        assert prompt_offsets(tokenizer, text, token_ids[-1:])[0] in range(len(text))


@pytest.mark.parametrize("trims", [False, True])
def test_offsets_in_a_prompt_that_the_normalizer_changes(tmp_path: Path, trims: bool) -> None:
    """Qwen's composes characters; GPT-2's post-processor counts no spaces before words."""
    made = byte_level_tokenizer()
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = load_tokenizer(tmp_path), "xe\u0301 ho😀b"
    token_ids = tokenizer.encode(text)
    assert [tokenizer.token_text(token) for token in token_ids][-6:] == [" h", "o", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert prompt_offsets(tokenizer, text, token_ids) == [0, 1, 1, 3, 5, 6, 6, 6, 7]
