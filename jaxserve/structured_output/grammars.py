"""Grammars for structured outputs: compiled off the step loop, and cached."""

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

from jaxserve.child_process import ProcessPool
from jaxserve.errors import SHUT_DOWN, EngineDeadError, RequestError
from jaxserve.sampling import grammar_check
from jaxserve.sampling.grammar import GrammarLimits, content_key, grammar_error, write_grammar
from jaxserve.sampling.grammar_check import SPECIAL_MARK, Vocabulary, make_matcher
from jaxserve.structured_output.grammar_constraint import Grammar
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer


class _Prepared(NamedTuple):
    """The vocabulary in llguidance's form, its special tokens by name, and the processes that try grammars out."""

    vocabulary: Vocabulary
    tokenizer: LLTokenizer
    special_tokens: dict[str, int]
    checkers: ProcessPool


class GrammarCompiler:
    """Compiles grammars on threads of its own, and keeps them.

    Each grammar is tried out in a process with limits on time, memory and stack before the engine's own process takes
    it: llguidance can hang or crash on small ones.

    Args:
        tokenizer: The model's.
        vocab_size: The model's number of ids; those without a token are never allowed.
        eos_token_ids: Tokens that end a text; where there is none, a text ends when its grammar allows nothing more.
        limits: What compiling may take.
        num_threads: Grammars compiled at the same time.
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
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, "grammar")
        self._cached: OrderedDict[tuple[str, ...], concurrent.futures.Future[Grammar]] = OrderedDict()
        self._num_waiting = 0
        self._is_closed = False
        self._lock = threading.Lock()  # of all the above
        self._prepared: _Prepared | None = None
        self._prepare_lock = threading.Lock()

    def submit(self, params: StructuredOutputsParams) -> concurrent.futures.Future[Grammar]:
        """The grammar, as soon as it is compiled: at once where it is cached. Cannot be cancelled: others may share it.

        The future fails with a `RequestError` that names ``structured_outputs`` where the parameters are at fault.
        """
        future: concurrent.futures.Future[Grammar] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        try:
            key = content_key(params, self._limits)
            with self._lock:
                if key in self._cached:
                    self._cached.move_to_end(key)
                    return self._cached[key]
                if self._num_waiting >= self._limits.max_waiting:
                    raise grammar_error(f"has to wait: {self._num_waiting} others are not compiled yet", params)
                self._threads.submit(self._run, key, params, future)
                self._num_waiting += 1
                self._cached[key] = future
                self._evict()
        except RequestError as error:
            future.set_exception(error)
        except RuntimeError:  # the threads have ended
            future.set_exception(EngineDeadError(SHUT_DOWN))
        return future

    def close(self) -> None:
        """Ends the threads and processes; what is not compiled yet fails."""
        self._is_closed = True
        if self._prepared is not None:
            self._prepared.checkers.kill()
        self._threads.shutdown()
        if self._prepared is not None:
            self._prepared.checkers.close()
            self._prepared.vocabulary.release()
        self._cached.clear()

    def _evict(self) -> None:
        """Forgets the grammars used least recently that are too many or too large together."""
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
                self._num_waiting -= 1
                if self._cached.get(key) is future:
                    del self._cached[key]
            future.set_exception(error)
        else:
            with self._lock:
                self._num_waiting -= 1
            future.set_result(grammar)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        prepared = self._prepare()
        source = write_grammar(params, prepared.special_tokens)
        try:
            text = self._checked(prepared.checkers, source.text, source.is_ebnf)
            matcher = make_matcher(prepared.tokenizer, text)
        except (ValueError, RuntimeError) as error:
            if self._is_closed:
                raise EngineDeadError(SHUT_DOWN) from error
            if isinstance(error, RuntimeError):
                raise
            raise grammar_error(f"cannot be compiled: {error}", params) from error
        grammar = Grammar(matcher, self._end_ids, self._vocab_size)
        if not self._end_ids and not any(grammar.constraint().mask()):
            raise grammar_error("allows only the empty text, and the model has no token that ends a text", params)
        return grammar

    def _prepare(self) -> _Prepared:
        """Makes the vocabulary on first use."""
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
                raw = b""  # a byte that no valid text has
            tokens.append(raw)
        if not self._end_ids:
            tokens.append(b"")
        end_ids = sorted(self._end_ids) or [self._vocab_size]
        return Vocabulary(tokens, end_ids, partial(self._tokenizer.encode, add_special_tokens=False))

    def _checked(self, checkers: ProcessPool, grammar: str, is_ebnf: bool) -> str:
        """Try a grammar out in a child process; return it in llguidance's form.

        Args:
            checkers: The processes.
            grammar: The grammar, in llguidance's form,
            is_ebnf: or in llama.cpp's EBNF.

        Raises:
            ValueError: It is wrong, or takes more time, memory or stack than allowed.
        """
        start_s = time.monotonic()
        answer = checkers.run(json.dumps({"grammar": grammar, "is_ebnf": is_ebnf}), self._limits.time_s)
        if answer is None:
            is_late = time.monotonic() - start_s >= self._limits.time_s
            why = (
                f"not done within {self._limits.time_s:g} s"
                if is_late
                else "it takes more memory or stack than allowed"
            )
            raise ValueError(f"it is too complex: {why}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["grammar"]


def own_error(error: BaseException) -> BaseException:
    """One request's error of a grammar's, which others share."""
    if isinstance(error, EngineDeadError):
        return EngineDeadError(str(error))
    if not isinstance(error, RequestError):
        return error
    own = RequestError(str(error))
    own.parameter = error.parameter
    return own
