"""The bytes of host memory that everything admitted takes, in all processes of the server, and their limit."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.rendering import MEMORY_BYTES
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.structured_params import KINDS
from jaxserve.server.auth import Caller
from jaxserve.server.errors import OutOfMemoryError
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.resources import available_memory_bytes
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tally import Tally

MIN_BUDGET_BYTES = 256 << 20
"""Least default of the budget; else it is a quarter of the memory that is available when the server starts."""

_LEAST_RENDERING_BYTES = 32 << 20
_TEXT_COPIES = 3
"""A text is in the front end, on its way, and in the engine process."""
_TOKENIZING_BYTES = 130
"""A byte of a text while it is tokenized, where each is a token: the tokenizer keeps how it changed the text."""
_TOKEN_BYTES = 100
"""A token id of a prompt: an object and its places in lists, here and in the engine process."""
_ITEM_BYTES = 4
"""Brackets, quotes and commas of a value of an object or array, which are written and read again."""
_OUTPUT_TOKEN_BYTES = 40
_SAMPLE_BYTES = 4096
_OPTION_BYTES = 250
"""An entry of ``logit_bias`` and the like, in both processes."""
_PROMPT_LOGPROB_BYTES = 80
_LOGPROB_BYTES = 250
_UNSTATED_TOKENS = 1024
"""Tokens that count for the logprobs of a completion whose request has no limit of its own."""


class ByteBudget:
    """Counts the bytes of what is admitted, in all and by caller, and rejects what exceeds the limit or a share of it.

    Attributes:
        limit_bytes: Most bytes at a time.

    Args:
        limit_bytes: Most bytes at a time.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._taken = Tally()  # by caller

    @property
    def num_bytes(self) -> int:
        """Bytes at present."""
        return self._taken.total

    def take(self, caller: Caller, num_bytes: int) -> None:
        """Reserve bytes for a caller; ``give_back`` releases them.

        Raises:
            RequestError: They are more than the caller may ever have.
            OutOfMemoryError: They do not fit beside those of the requests in flight.
        """
        share = int(self.limit_bytes * caller.max_memory_share)
        if num_bytes > share:
            raise RequestError(
                f"this request takes about {num_bytes} bytes of the server's memory; limit {share} "
                "(max_admitted_bytes and the key's max_memory_share). Ask for fewer prompts, tokens, logprobs or "
                "completions"
            )
        own = self._taken[caller.name]
        if self.num_bytes + num_bytes > self.limit_bytes:
            raise OutOfMemoryError(
                f"out of memory for requests: those in flight take {self.num_bytes} bytes, limit {self.limit_bytes} "
                f"(max_admitted_bytes), and this one {num_bytes}; retry later"
            )
        if own + num_bytes > share:
            raise OutOfMemoryError(
                f"out of memory for requests of this API key: those in flight take {own} bytes, limit {share} "
                f"(max_memory_share), and this one {num_bytes}; retry later"
            )
        self.note(caller.name, num_bytes)

    def give_back(self, caller: Caller, num_bytes: int) -> None:
        """Release bytes."""
        self.note(caller.name, -num_bytes)

    @contextlib.contextmanager
    def held(self, name: str, num_bytes: int) -> Iterator[None]:
        """Count bytes of a caller that cannot be refused while the block runs."""
        self.note(name, num_bytes)
        try:
            yield
        finally:
            self.note(name, -num_bytes)

    def note(self, name: str, num_bytes: int) -> None:
        """Count bytes of a caller that cannot be refused, or that are released if the number is negative."""
        self._taken.add(name, num_bytes)


def budget_bytes(config: ServerConfig) -> int:
    """Return the bytes that requests may take: a quarter of the memory that is available, and some in any case."""
    default = max(MIN_BUDGET_BYTES, 16 * config.max_request_bytes, available_memory_bytes() // 4)
    return config.max_admitted_bytes or default


def rendering_bytes(config: ServerConfig) -> int:
    """Return the bytes that a process may take to render a chat: those of all processes are half of the budget."""
    return min(MEMORY_BYTES, max(_LEAST_RENDERING_BYTES, budget_bytes(config) // 8))


def request_bytes(request: Request, model: model_pb2.Model) -> int:
    """Estimate the bytes that a request takes in all processes from its admission to its end, its outputs aside."""
    text_bytes, ids = _size([request.text, request.chat]), request.token_ids
    num_tokens = min(text_bytes // 2, model.max_model_len) if ids is None else len(ids)
    num_bytes = (_TEXT_COPIES + _TOKENIZING_BYTES) * text_bytes + _TOKEN_BYTES * num_tokens
    if request.pooling is not None:
        return num_bytes + _SAMPLE_BYTES
    return num_bytes + _SAMPLE_BYTES * request.params.n + _option_bytes(request.params, num_tokens, model)


def conversion_bytes(*, text: object = None, num_tokens: int = 0) -> int:
    """Estimate the bytes that a conversion between text and tokens takes.

    Args:
        text: A text, or the fields of a chat, that becomes tokens.
        num_tokens: Number of tokens that become text.
    """
    return (_TEXT_COPIES + _TOKENIZING_BYTES) * _size(text) + _TOKEN_BYTES * num_tokens


def _option_bytes(params: SamplingParams, num_tokens: int, model: model_pb2.Model) -> int:
    if params.is_plain:
        return 0
    listed = (params.logit_bias, params.stop_token_ids, params.allowed_token_ids, params.logprob_token_ids)
    num_bytes = _OPTION_BYTES * sum(map(len, filter(None, listed)))
    texts = (*params.stop_strings, *(params.bad_words or ()))
    num_bytes += sum(_TEXT_COPIES * len(text) + _OPTION_BYTES for text in texts)
    if params.structured_outputs is not None:
        num_bytes += _TEXT_COPIES * _size([getattr(params.structured_outputs, kind) for kind in KINDS])
    if params.prompt_logprobs is not None:
        num_bytes += _PROMPT_LOGPROB_BYTES * num_tokens * _width(params.prompt_logprobs, model)
    if params.num_logprobs is not None:
        num_new = min(_UNSTATED_TOKENS if params.max_tokens is None else params.max_tokens, model.max_model_len)
        num_bytes += _LOGPROB_BYTES * params.n * num_new * _width(params.num_logprobs, model)
    return num_bytes


def _width(num_logprobs: int, model: model_pb2.Model) -> int:
    """Return the number of entries of a position."""
    return 1 + (model.vocab_size if num_logprobs < 0 else num_logprobs)


def output_bytes(output: RequestOutput) -> int:
    """Estimate the bytes of an output that waits to be written."""
    num_items = len(output.prompt_token_ids) + len(output.embedding or ())
    num_bytes = _OUTPUT_TOKEN_BYTES * num_items + _logprob_bytes(output.prompt_logprobs)
    for one in output.outputs:
        num_bytes += len(one.text) + _OUTPUT_TOKEN_BYTES * len(one.token_ids) + _logprob_bytes(one.logprobs)
    return num_bytes


def conversion_output_bytes(num_tokens: int, texts: Iterable[str] = ()) -> int:
    """Estimate the bytes of token ids, and of their texts, that wait to be written."""
    return _OUTPUT_TOKEN_BYTES * num_tokens + sum(_OUTPUT_TOKEN_BYTES + len(text) for text in texts)


def _logprob_bytes(logprobs: object) -> int:
    return _OUTPUT_TOKEN_BYTES * logprobs.num_entries if isinstance(logprobs, PackedLogprobs) else 0


def _size(value: Any) -> int:
    """Return the bytes, in UTF-8, of all texts in a JSON value, and some for each value in an object or array."""
    total, parts = 0, [value]
    for part in parts:  # which grows meanwhile
        kind = type(part)
        if kind is str:
            total += len(part) if part.isascii() else len(part.encode("utf-8", "surrogatepass"))
        elif kind is dict:
            parts += part
            parts += part.values()
            total += _ITEM_BYTES * len(part)
        elif kind is list or kind is tuple:
            parts += part
            total += _ITEM_BYTES * len(part)
    return total
