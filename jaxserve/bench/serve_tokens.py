"""Where random prompts get their tokens from: a tokenizer here, else the server's own, else plain words."""

import dataclasses
import itertools
import string
from collections.abc import Awaitable, Callable, Sequence

from checkpoints import resolve_model
from jaxserve.bench.serve_answer import BenchServeError
from jaxserve.bench.serve_http import HttpAnswer, HttpClient
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.engine.tokenizer import load_tokenizer

WORDS = tuple(first + second for first, second in itertools.product(string.ascii_lowercase, repeat=2))
"""Short words: about a token each, whatever the tokenizer."""


@dataclasses.dataclass(frozen=True)
class TokenSource:
    """Tokens to draw from, and what else can be done with them.

    Attributes:
        token_ids: Ids to draw from; without a tokenizer, indices of ``WORDS``.
        decode: Ids to text; None: nobody can tell.
        count: The tokens of a text; None: nobody can tell.
        are_words: Whether they are words in place of tokens, so that lengths are but about right.
    """

    token_ids: Sequence[int]
    decode: Callable[[list[int]], Awaitable[str]] | None = None
    count: Callable[[str], Awaitable[int]] | None = None
    are_words: bool = False


def plain_range(vocab_size: int) -> range:
    """Token ids below a vocabulary's size without the first few, where special tokens live."""
    return range(min(256, vocab_size // 2), vocab_size)


def local_tokens(model: str) -> TokenSource:
    """Tokens of the tokenizer of a model directory, a hub id, or ``demo``.

    Raises:
        ConfigError: There is no tokenizer that can be read.
    """
    tokenizer = load_tokenizer(MODEL_DIRECTORY if model == "demo" else resolve_model(model))

    async def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids)

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    special = tokenizer.all_special_ids
    return TokenSource([i for i in plain_range(tokenizer.vocab_size) if i not in special], decode, count)


async def server_tokens(client: HttpClient, model: str) -> TokenSource:
    """Tokens of the server's own tokenizer, by vLLM's ``/tokenize``; words where the server has no such path.

    The ids are those that plain words turn into: special tokens are none of them.
    """

    async def tokenize(text: str) -> HttpAnswer:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return await client.request("POST", "/tokenize", body)

    async def count(text: str) -> int:
        answer = _checked(await tokenize(text))
        return len(answer.json()["tokens"])

    async def decode(token_ids: list[int]) -> str:
        answer = await client.request("POST", "/detokenize", {"model": model, "tokens": token_ids})
        return _checked(answer).json()["prompt"]

    answer = await tokenize(" ".join(WORDS))
    if answer.status != 200:
        return word_tokens()
    found = answer.json().get("tokens")
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found) or not found:
        return word_tokens()
    return TokenSource(sorted(set(found)), decode, count)


def word_tokens() -> TokenSource:
    """Words in place of tokens."""

    async def decode(token_ids: list[int]) -> str:
        return " ".join(WORDS[i] for i in token_ids)

    return TokenSource(range(len(WORDS)), decode, are_words=True)


def _checked(answer: HttpAnswer) -> HttpAnswer:
    if answer.status != 200:
        raise BenchServeError(f"the server's tokenizer answered with status {answer.status}: {answer.body[:200]!r}")
    return answer
