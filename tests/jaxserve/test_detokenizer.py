"""Incremental text equals the decode of everything, and stop strings cut it exactly."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxserve.text.detokenizer import Detokenizer, StopVerdict
from jaxserve.text.tokenizer import Tokenizer

TINY = ("byte-level", "byte-fallback", "words")
shared_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def interesting_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Lists that mix any id with byte tokens, special tokens and ids outside the vocabulary."""
    size = tokenizer.vocab_size
    pieces = tokenizer.pieces(skip_special_tokens=False)
    partial = [token_id for token_id in range(min(size, 1000)) if pieces[token_id] is None] or [0]
    special = sorted(tokenizer.all_special_ids) or [0]
    one = st.one_of(
        st.integers(0, size - 1), st.sampled_from(partial), st.sampled_from(special), st.integers(size, size + 3)
    )
    return st.lists(one, max_size=24)


class Delta(NamedTuple):
    """What a push adds: text, and the stop string that it completes."""

    text: str
    stop: StopVerdict | None


def push(detokenizer: Detokenizer, token_ids: Sequence[int]) -> Delta:
    """Push the next ids."""
    stop = detokenizer.push_tokens(token_ids)
    return Delta(detokenizer.take(), stop)


def pushed(detokenizer: Detokenizer, token_ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """All deltas of pushing the ids in groups of the sizes (repeated as needed), the flush last."""
    deltas, start, turn = [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        delta = push(detokenizer, token_ids[start : start + size])
        deltas.append(delta.text)
        if delta.stop is not None:
            break
        start, turn = start + size, turn + 1
    return [*deltas, detokenizer.flush()]


def check_equals_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Concatenated deltas are the decode, and every text on the way is a beginning of it."""
    token_ids = data.draw(interesting_ids(tokenizer))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    skips = data.draw(st.booleans())
    whole = tokenizer.decode(token_ids, skip_special_tokens=skips)
    detokenizer = Detokenizer(tokenizer.pieces(skips))
    text = ""
    for delta in pushed(detokenizer, token_ids, sizes):
        text += delta
        assert whole.startswith(text)
    assert text == whole == detokenizer.text
    assert detokenizer.num_tokens == len(token_ids)


@pytest.mark.parametrize("name", TINY)
@settings(shared_fixture, max_examples=100)
@given(data=st.data())
def test_deltas_are_the_decode(tiny_tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    check_equals_decode(tiny_tokenizers[name], data)


@settings(shared_fixture, max_examples=60)
@given(data=st.data())
def test_deltas_are_the_decode_of_real_tokenizers(
    each_real_tokenizer: tuple[str, Tokenizer], data: st.DataObject
) -> None:
    check_equals_decode(each_real_tokenizer[1], data)


class Stopped(NamedTuple):
    """Where a sequence ends."""

    text: str
    stop: str | None
    num_tokens: int


def stable_texts(tokenizer: Tokenizer, token_ids: list[int], whole: str) -> list[str]:
    """Text after each token, unfinished characters left out. The ids must spell valid text."""
    texts = [""]
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count]).rstrip("\ufffd")
        texts.append(text if whole.startswith(text) and len(text) > len(texts[-1]) else texts[-1])
    return texts


def expected_stop(texts: list[str], stops: list[str], includes: bool, min_tokens: int) -> Stopped:
    """Looks at the text after each token for a stop string that ends in what the token added."""
    for count in range(min_tokens + 1, len(texts)):
        seen, text = len(texts[count - 1]), texts[count]
        found = [
            (start + len(stop), start, stop)
            for stop in stops
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > seen
        ]
        if found:
            end, start, stop = min(found)
            return Stopped(text[: end if includes else start], stop, count)
    return Stopped(texts[-1], None, len(texts) - 1)


def check_stops(tokenizer: Tokenizer, data: st.DataObject, alphabet: str) -> None:
    """Draws a text and stop strings, some cut from it; compares with a search of the whole text after each token."""
    text = data.draw(st.text(alphabet=alphabet, max_size=24))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(token_ids)
    assume("\ufffd" not in whole)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 5)).map(lambda cut: whole[cut[0] : sum(cut)])
    stops = data.draw(
        st.lists(st.one_of(cuts, st.text(alphabet=alphabet, max_size=4)).filter(bool), min_size=1, max_size=3)
    )
    includes, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 6))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    detokenizer = Detokenizer(
        tokenizer.pieces(), stop=stops, include_stop_str_in_output=includes, min_tokens=min_tokens
    )
    deltas = pushed(detokenizer, token_ids, sizes)
    wanted = expected_stop(stable_texts(tokenizer, token_ids, whole), stops, includes, min_tokens)
    assert "".join(deltas) == detokenizer.text == wanted.text
    assert detokenizer.num_tokens == wanted.num_tokens
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(shared_fixture, max_examples=150)
@given(data=st.data())
def test_stop_strings(tiny_tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject) -> None:
    check_stops(tiny_tokenizers[name], data, "ab e\nhl.é🙂")


@settings(shared_fixture, max_examples=40)
@given(data=st.data())
def test_stop_strings_of_real_tokenizers(each_real_tokenizer: tuple[str, Tokenizer], data: st.DataObject) -> None:
    check_stops(each_real_tokenizer[1], data, "ab the\nUse:é叫🙂")


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return [token_id for token_id in found if token_id is not None]


@pytest.fixture
def byte_level(tiny_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tiny_tokenizers["byte-level"]


@pytest.fixture
def byte_fallback(tiny_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tiny_tokenizers["byte-fallback"]


def test_a_character_comes_whole(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces())
    token_ids = byte_level.encode("a🙂b")
    assert [push(detokenizer, [token_id]).text for token_id in token_ids] == ["a", "", "", "🙂", "b"]


def test_an_unfinished_character_is_replaced_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces())
    token_ids = byte_level.encode("a🙂")[:-1]
    assert push(detokenizer, token_ids).text == "a"
    assert detokenizer.flush() == "\ufffd"


def test_no_beginning_of_a_stop_string_leaks(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces(), stop=["hello!"])
    deltas = [push(detokenizer, [token_id]).text for token_id in ids_of(byte_level, "a", "h", "e", "l", "h", "e")]
    assert deltas == ["a", "", "", "", "hel", ""]
    assert detokenizer.flush() == "he"
    assert detokenizer.text == "ahelhe"


def test_the_verdict_counts_tokens_and_later_ones_are_dropped(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces(), stop=["zz", "ell"])
    assert push(detokenizer, ids_of(byte_level, "a", "h")).text == "ah"
    delta = push(detokenizer, ids_of(byte_level, "e", "ll", "o", "a"))
    assert delta.text == ""
    assert delta.stop is not None
    assert (delta.stop.stop_string, delta.stop.num_tokens, detokenizer.num_tokens) == ("ell", 4, 4)
    assert detokenizer.text == "ah"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(shared_fixture, max_examples=100)
@given(data=st.data())
def test_what_is_taken_adds_up_and_never_has_to_be_taken_back(
    tiny_tokenizers: dict[str, Tokenizer], name: str, data: st.DataObject
) -> None:
    """One token at a time, taken now and then, the text read in between: no half character, no part of a stop."""
    tokenizer = tiny_tokenizers[name]
    text = data.draw(st.text(alphabet="ab e\nhl.é🙂", max_size=24))
    stops = data.draw(st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=3), max_size=2))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(token_ids)
    detokenizer, expected = Detokenizer(tokenizer.pieces(), stop=stops), Detokenizer(tokenizer.pieces(), stop=stops)
    taken = ""
    for token_id in token_ids:
        stop = detokenizer.push_tokens([token_id])
        assert stop == push(expected, [token_id]).stop
        if data.draw(st.booleans()):
            taken += detokenizer.take()
            assert detokenizer.take() == ""
            assert whole.startswith(taken)
        if data.draw(st.booleans()):
            assert detokenizer.text == expected.text
        if stop is not None:
            break
    assert detokenizer.flush() == expected.flush()
    taken += detokenizer.take()
    assert taken == detokenizer.text == expected.text
    assert not any(stop in taken for stop in stops)


def test_the_stop_string_may_stay(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces(), stop=["ll"], include_stop_str_in_output=True)
    assert push(detokenizer, ids_of(byte_level, "hell", "o")).text == "hell"


def test_min_tokens_hides_earlier_stop_strings_but_not_those_that_straddle(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level.pieces(), stop=["a", "hel"], min_tokens=2)
    assert push(detokenizer, ids_of(byte_level, "a", "h")) == ("a", None)
    delta = push(detokenizer, ids_of(byte_level, "e", "l"))
    assert delta.stop is not None
    assert (delta.text, delta.stop.num_tokens) == ("", 4)


def test_a_newline_spelt_as_a_byte_stops_at_once(byte_fallback: Tokenizer) -> None:
    """It is not given out before it is known that the run of bytes is valid, but generation need not wait for that."""
    detokenizer = Detokenizer(byte_fallback.pieces(), stop=["\n"])
    delta = push(detokenizer, ids_of(byte_fallback, "a", "<0x0A>"))
    assert delta.stop is not None
    assert (delta.text, delta.stop.num_tokens) == ("a", 2)


def test_with_the_prompt_the_text_continues_it(byte_fallback: Tokenizer) -> None:
    prompt = byte_fallback.encode("hello")
    new = ids_of(byte_fallback, "▁a", "b")
    assert push(Detokenizer(byte_fallback.pieces()), new).text == "ab"
    assert push(Detokenizer(byte_fallback.pieces(), prompt_token_ids=prompt), new).text == " ab"
    only_bos = ids_of(byte_fallback, "<s>")
    assert push(Detokenizer(byte_fallback.pieces(), prompt_token_ids=only_bos), new).text == "ab"
    assert push(Detokenizer(byte_fallback.pieces(False), prompt_token_ids=only_bos), new).text == " ab"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@settings(shared_fixture, max_examples=100)
@given(text=st.text(alphabet="ab e\nhl.é🙂", max_size=24), data=st.data())
def test_prompt_and_continuation_are_the_whole(
    tiny_tokenizers: dict[str, Tokenizer], name: str, text: str, data: st.DataObject
) -> None:
    """Wherever the ids are cut, whole characters of the prompt and the continuation's text make the full text."""
    tokenizer = tiny_tokenizers[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    whole = tokenizer.decode(token_ids)
    prompt_text = stable_texts(tokenizer, token_ids, whole)[cut]
    detokenizer = Detokenizer(tokenizer.pieces(), prompt_token_ids=token_ids[:cut])
    assert prompt_text + "".join(pushed(detokenizer, token_ids[cut:], [1])) == whole


def test_special_tokens_between_bytes_do_not_break_a_character(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("é", add_special_tokens=False)
    (end,) = ids_of(byte_level, "<|end|>")
    assert push(Detokenizer(byte_level.pieces(True)), [first, end, second]).text == "é"
    assert push(Detokenizer(byte_level.pieces(False)), [first, end, second]).text == "\ufffd<|end|>\ufffd"


def test_cost_of_a_push_does_not_grow_with_the_text(byte_level: Tokenizer) -> None:
    """What is searched again is shorter than the longest stop string, however long the text."""
    detokenizer = Detokenizer(byte_level.pieces(), stop=["aaab"])
    (letter,) = ids_of(byte_level, "a")
    deltas = [push(detokenizer, [letter]).text for _ in range(1000)]
    assert deltas == ["", "", "", *["a"] * 997]
    assert detokenizer.flush() == "aaa"
