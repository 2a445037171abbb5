"""Sources of random prompts' tokens: a local tokenizer, else the server's own, else plain words."""

import dataclasses
import itertools
import string
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jaxserve.bench.serve.http import HttpClient, HttpResponse
from jaxserve.bench.serve.ready import ask_http
from jaxserve.bench.serve.records import BenchServeError
from jaxserve.models.loading import find_model_directory
from jaxserve.text.gguf_tokenizer import load_model_tokenizer

WORDS = tuple(first + second for first, second in itertools.product(string.ascii_lowercase, repeat=2))
"""Short words of about one token each, whatever the tokenizer."""
_NO_PATH = (404, 405)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TokenSource:
    """Tokens for random prompts, and optional operations on them.

    Attributes:
        token_ids: Ids to draw from; without a tokenizer, indices of ``WORDS``.
        decode: Converts ids to text; None if unavailable.
        count: Counts the tokens of a text; None if unavailable.
        are_words: Whether these are words instead of tokens, so that lengths are approximate.
    """

    token_ids: Sequence[int]
    decode: Callable[[list[int]], Awaitable[str]] | None = None
    count: Callable[[str], Awaitable[int]] | None = None
    are_words: bool = False


@dataclasses.dataclass
class PromptTokens:
    """The tokens of a load test, found at first use.

    Attributes:
        find: Finds the tokens.
        found: The result; None before the first use.
    """

    find: Callable[[], Awaitable[TokenSource]]
    found: TokenSource | None = None

    async def get(self) -> TokenSource:
        """Return the tokens."""
        if self.found is None:
            self.found = await self.find()
        return self.found


def plain_range(vocab_size: int) -> range:
    """Return the token ids below a vocabulary's size without the first few, which are often special tokens."""
    return range(min(256, vocab_size // 2), vocab_size)


def local_tokens(model: str) -> TokenSource:
    """Return the tokens of a model directory, a hub id, or ``demo``.

    Raises:
        ConfigError: No tokenizer can be read.
    """
    tokenizer = load_model_tokenizer(find_model_directory(model))

    async def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids)

    async def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    special = tokenizer.all_special_ids
    return TokenSource([i for i in plain_range(tokenizer.vocab_size) if i not in special], decode, count)


async def server_tokens(client: HttpClient, model: str) -> TokenSource:
    """Return the tokens of the server's own tokenizer, using vLLM's ``/tokenize``.

    The ids are those of plain words, so that there are no special tokens. If the server has no such path, as with other
    engines, plain words are used instead, and a line on standard error says so.

    Raises:
        NotReadyError: The server cannot be reached, or reports that it is not ready.
        BenchServeError: It has the path, but its response is invalid.
    """

    async def tokenize(text: str) -> HttpResponse:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return await ask_http(client, "POST", "/tokenize", body)

    async def count(text: str) -> int:
        return len(_tokens_of(await tokenize(text)))

    async def decode(token_ids: list[int]) -> str:
        response = await ask_http(client, "POST", "/detokenize", {"model": model, "tokens": token_ids})
        return _field(response, "prompt", str)

    response = await tokenize(" ".join(WORDS))
    if response.status in _NO_PATH:
        reason = f"{client.base_url} has no /tokenize (status {response.status})"
        print(f"{reason}: using plain words instead of tokens; lengths are approximate", file=sys.stderr, flush=True)
        return word_tokens()
    found = _tokens_of(response)
    if not found:
        raise _wrong_response(response)
    return TokenSource(sorted(set(found)), decode, count)


def word_tokens() -> TokenSource:
    """Return words instead of tokens."""

    async def decode(token_ids: list[int]) -> str:
        return " ".join(WORDS[i] for i in token_ids)

    return TokenSource(range(len(WORDS)), decode, are_words=True)


def _tokens_of(response: HttpResponse) -> list[int]:
    found = _field(response, "tokens", list)
    if not all(type(token) is int for token in found):
        raise _wrong_response(response)
    return found


def _field(response: HttpResponse, name: str, kind: type[T]) -> T:
    """Return a field of a successful response."""
    fields = response.json() if response.status == 200 else None
    value = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(value, kind):
        raise _wrong_response(response)
    return value


def _wrong_response(response: HttpResponse) -> BenchServeError:
    what = f"status {response.status}: {response.body[:200]!r}"
    return BenchServeError(f"the server's tokenizer responded with {what}; pass --tokenizer to use another")
