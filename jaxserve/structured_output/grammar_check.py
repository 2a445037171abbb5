"""Compiles grammars with llguidance in a separate process first, because a small grammar can hang or crash it.

`python -P grammar_check.py` is that process. It imports nothing of this project, reads one JSON line with the
vocabulary, and answers each JSON line with a grammar by one JSON line: the grammar in llguidance's form, or the error.
It has less stack and memory than the engine, so a grammar that passes here can be compiled there.
"""

import base64
import json
import resource
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask

STACK_BYTES = 1 << 20
"""Stack size of the checking thread; a thread of the engine has at least twice as much, and usually 8 MiB."""
SPECIAL_MARK = b"\xff"
"""A byte that starts no UTF-8 string."""
MAX_SKIPPED = 4
"""Number of leading tokens of a text that may merge with the text before it, plus one."""


class Vocabulary:
    """The vocabulary in llguidance's form: bytes by id, and a function that tokenizes text that a grammar forces.

    Args:
        tokens: Bytes of each id. After `SPECIAL_MARK`, the name of a token that is not matched as text; b"" for an id
            that is only allowed as an end of sequence.
        end_ids: End-of-sequence ids; at least one.
        encode: Tokenizes a string. It may be wrong about white space: a result that does not spell the text is ignored.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(
        self, tokens: Sequence[bytes], end_ids: Sequence[int], encode: Callable[[str], list[int]] | None = None
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end_ids[0]
        self.end_ids = list(end_ids)
        self._encode = encode
        self._greedy: LLTokenizer | None = None

    def build(self) -> LLTokenizer:
        """Build llguidance's object, which takes seconds for a large vocabulary."""
        wrapper: Any = self
        self._greedy = LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.end_ids)
        return self._greedy

    def release(self) -> None:
        """Drop the reference to the object of `build`; it refers back to this one, invisible to the garbage
        collector."""
        self._greedy = None

    def __call__(self, text: str) -> list[int]:
        """Return ids that spell a text. llguidance calls this and accepts no exception."""
        try:
            found = self._tokenize(text)
        except Exception:  # a tokenizer may raise anything
            found = None
        if found is not None:
            return found
        return [] if self._greedy is None else self._greedy.greedy_tokenize(text)

    def _tokenize(self, text: str) -> list[int] | None:
        """Return the tokenizer's ids; from the middle of a text if the tokenizer starts texts with a space."""
        if self._encode is None:
            return None
        raw = text.encode()
        for before in ("", "\n"):
            ids = self._encode(before + text)
            for skipped in range(min(len(ids), MAX_SKIPPED)):
                if b"".join(self.tokens[token_id] for token_id in ids[skipped:]) == raw:
                    return ids[skipped:]
        return None


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of a completion, with its first mask computed.

    Raises:
        ValueError: The grammar is invalid, too large, or matches no text that the vocabulary can spell.
    """
    limits = LLParserLimits(
        max_items_in_row=10_000, max_lexer_states=100_000, max_grammar_size=200_000, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        mask = np.zeros((1, (tokenizer.vocab_size + 31) // 32), np.int32)
        fill_next_token_bitmask(matcher, mask)
        if not matcher.is_error() and mask.any():
            return matcher
    error = error_text(matcher)
    if not error or error.startswith("NoExtension"):
        error = "no text matches it"
    raise ValueError(error[:500])


def error_text(matcher: LLMatcher) -> str:
    """Return the error of a matcher on one line; empty if it has none."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())


def check(tokenizer: LLTokenizer, grammar: str, is_ebnf: bool, named: Mapping[str, str]) -> dict[str, str]:
    """Return the result of one grammar, which may call named ones: ``{"grammar": ...}`` or ``{"error": ...}``."""
    try:
        if is_ebnf:
            grammar = any_to_lark(grammar)
        if named:
            others = [{"name": name, "lark_grammar": any_to_lark(text)} for name, text in named.items()]
            grammar = json.dumps({"grammars": [{"name": "start", "lark_grammar": grammar}, *others]})
        make_matcher(tokenizer, grammar).deep_copy()
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # llguidance's converter raises bare Exception
        return {"error": str(error)[:500]}
    return {"grammar": grammar}


def _limit_memory(extra_bytes: int) -> None:
    """Limit the growth of this process's memory in bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_cpu(seconds: int) -> None:
    """Limit this process to some more seconds of CPU time, so that it ends even if its parent has exited."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds + 1, hard))


def _serve() -> None:
    setup = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokens = [base64.b64decode(token) for token in setup["tokens"]]
    tokenizer = Vocabulary(tokens, setup["end_ids"]).build()
    if sys.platform == "linux":
        _limit_memory(setup["memory_bytes"])
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        _limit_cpu(setup["cpu_s"])
        print(json.dumps(check(tokenizer, job["grammar"], job["is_ebnf"], job["named"])), flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
