"""Compile and cache grammars for structured outputs."""

import base64
import concurrent.futures
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from llguidance import LLTokenizer

from jaxserve.api.errors import SHUT_DOWN, EngineDeadError, RequestError
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.api.turns import SHARED_TURN, FairThreads, Turn
from jaxserve.child_process import ProcessPool
from jaxserve.structured_output import grammar_check
from jaxserve.structured_output.grammar_check import SPECIAL_MARK, Vocabulary, make_matcher
from jaxserve.structured_output.grammar_constraint import Grammar
from jaxserve.structured_output.grammar_source import (
    GrammarLimits,
    GrammarSource,
    content_key,
    grammar_error,
    write_grammar,
)
from jaxserve.text.tokenizer import Tokenizer


def _is_exhausted(grammar: concurrent.futures.Future[Grammar]) -> bool:
    return grammar.done() and grammar.exception() is None and grammar.result().is_exhausted


class _Prepared(NamedTuple):
    """The vocabulary in llguidance's form, its special tokens by name, and the processes that check grammars."""

    vocabulary: Vocabulary
    tokenizer: LLTokenizer
    special_tokens: dict[str, int]
    checkers: ProcessPool


class GrammarCompiler:
    """Compiles grammars on its own threads, and caches them.

    Each grammar is first compiled in a child process with limits on time, memory and stack, because llguidance can hang
    or crash on small grammars.

    Args:
        tokenizer: Tokenizer of the model.
        vocab_size: Vocabulary size of the model; ids without a token are never allowed.
        eos_token_ids: End-of-sequence tokens; without any, a completion ends when its grammar allows no further token.
        limits: Limits on compilation.
        num_threads: Number of grammars compiled in parallel.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        limits: GrammarLimits | None = None,
        num_threads: int = 2,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._limits = limits or GrammarLimits()
        self._threads = FairThreads(num_threads, "grammar")
        self._cached: OrderedDict[tuple[str, ...], concurrent.futures.Future[Grammar]] = OrderedDict()
        self._waiting: dict[concurrent.futures.Future[Grammar], str] = {}  # each with the key that it is compiled for
        self._is_closed = False
        self._lock = threading.Lock()  # guards all of the above
        self._prepared: _Prepared | None = None
        self._prepare_lock = threading.Lock()

    def submit(self, params: StructuredOutputsParams, turn: Turn = SHARED_TURN) -> concurrent.futures.Future[Grammar]:
        """Compile a grammar, or return the cached one. The future is shared and cannot be cancelled.

        The future fails with a `RequestError` that names ``structured_outputs`` if the parameters are invalid.

        Args:
            params: The grammar.
            turn: Whose turn it takes: one that waits among those of another API key is compiled again.
        """
        future: concurrent.futures.Future[Grammar] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        try:
            key = content_key(params, self._limits)
            with self._lock:
                cached = self._cached.pop(key, None)
                is_own = cached is not None and self._waiting.get(cached, turn.key) == turn.key
                if cached is not None and is_own and not _is_exhausted(cached):
                    self._cached[key] = cached
                    return cached
                num_waiting = sum(other == turn.key for other in self._waiting.values())
                if num_waiting >= self._limits.max_waiting:
                    raise grammar_error(f"is rejected: {num_waiting} grammars are waiting to be compiled", params)
                self._threads.submit(self._run, key, params, future, turn=turn)
                self._waiting[future] = turn.key
                self._cached[key] = future
                self._evict()
        except RequestError as error:
            future.set_exception(error)
        except RuntimeError:  # the pool is shut down
            future.set_exception(EngineDeadError(SHUT_DOWN))
        return future

    def close(self) -> None:
        """End the threads and processes; grammars not compiled yet fail."""
        self._is_closed = True
        if self._prepared is not None:
            self._prepared.checkers.kill()
        self._threads.shutdown()
        if self._prepared is not None:
            self._prepared.checkers.close()
            self._prepared.vocabulary.release()
        self._cached.clear()

    def _evict(self) -> None:
        """Evict the least recently used grammars beyond the limits on number and bytes."""
        num_bytes = sum(len(key[1]) for key in self._cached)
        while len(self._cached) > self._limits.max_cached or num_bytes > self._limits.max_cached_bytes:
            key, _ = self._cached.popitem(last=False)
            num_bytes -= len(key[1])

    def _run(
        self, key: tuple[str, ...], params: StructuredOutputsParams, future: concurrent.futures.Future[Grammar]
    ) -> None:
        try:
            grammar = self._compile(params)
        except BaseException as error:
            with self._lock:
                del self._waiting[future]
                if self._cached.get(key) is future:
                    del self._cached[key]
            future.set_exception(error)
        else:
            with self._lock:
                del self._waiting[future]
            future.set_result(grammar)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        prepared = self._prepare()
        source = write_grammar(params, prepared.special_tokens)
        try:
            text = self._check(prepared.checkers, source)
            matcher = make_matcher(prepared.tokenizer, text)
        except (ValueError, RuntimeError) as error:
            if self._is_closed:
                raise EngineDeadError(SHUT_DOWN) from error
            if isinstance(error, RuntimeError):
                raise
            raise grammar_error(f"cannot be compiled: {error}", params) from error
        grammar = Grammar(params, matcher, self._end_ids, self._vocab_size)
        if not self._end_ids and not any(grammar.constraint().mask()):
            raise grammar_error("matches only the empty string, and the model has no end-of-sequence token", params)
        return grammar

    def _prepare(self) -> _Prepared:
        """Create the vocabulary and the processes on first use."""
        with self._prepare_lock:
            if self._prepared is None:
                vocabulary = self._make_vocabulary()
                special = [token for token in self._tokenizer.all_special_ids if token < self._vocab_size]
                names = {self._tokenizer.token_text(token): token for token in special}
                setup = {
                    "tokens": [base64.b64encode(token).decode() for token in vocabulary.tokens],
                    "end_ids": vocabulary.end_ids,
                    "memory_bytes": self._limits.memory_bytes,
                    "cpu_s": int(self._limits.time_s) + 1,
                }
                checkers = ProcessPool([grammar_check.__file__], setup, is_quiet=True)
                self._prepared = _Prepared(vocabulary, vocabulary.build(), names, checkers)
                if self._is_closed:  # ``close`` has not seen them
                    checkers.kill()
            return self._prepared

    def _make_vocabulary(self) -> Vocabulary:
        pieces = self._tokenizer.pieces(skip_special_tokens=False)
        special = self._tokenizer.all_special_ids | self._end_ids
        tokens: list[bytes] = []
        for token in range(self._vocab_size):
            text = pieces[token]
            raw = pieces.raw(token) if text is None else text.encode()
            if token in special and raw:
                raw = SPECIAL_MARK + raw
            elif raw.startswith(SPECIAL_MARK):
                raw = b""  # would be taken for a special token; no valid text has this byte
            tokens.append(raw)
        if not self._end_ids:
            tokens.append(b"")
        end_ids = sorted(self._end_ids) or [self._vocab_size]
        return Vocabulary(tokens, end_ids, partial(self._tokenizer.encode, add_special_tokens=False))

    def _check(self, checkers: ProcessPool, source: GrammarSource) -> str:
        """Compile a grammar in a child process; return it in llguidance's form.

        Args:
            checkers: The processes.
            source: The grammar.

        Raises:
            ValueError: The grammar is invalid, or exceeds the time, memory or stack limit.
        """
        start_s = time.monotonic()
        job = {"grammar": source.text, "is_ebnf": source.is_ebnf, "named": dict(source.named)}
        result = checkers.run(json.dumps(job).encode(), self._limits.time_s)
        if result is None:
            timed_out = time.monotonic() - start_s >= self._limits.time_s
            timeout = f"not compiled within {self._limits.time_s:g} s"
            raise ValueError(f"it is too complex: {timeout if timed_out else 'it exceeds the memory or stack limit'}")
        if "error" in result:
            raise ValueError(result["error"])
        return result["grammar"]


def copy_error(error: BaseException) -> BaseException:
    """Return a copy of a grammar's error for one request, because requests share the grammar."""
    if isinstance(error, EngineDeadError):
        return EngineDeadError(str(error))
    if not isinstance(error, RequestError):
        return error
    copy = RequestError(str(error))
    copy.parameter = error.parameter
    return copy
