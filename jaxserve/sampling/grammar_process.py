"""The engine's end of the process that tries grammars out."""

import base64
import json
import time

from jaxserve.child_process import LineProcess
from jaxserve.sampling import grammar_check
from jaxserve.sampling.grammar import GrammarLimits
from jaxserve.sampling.grammar_check import Vocabulary

START_LIMIT_S = 60.0


class GrammarChecker:
    """A process that tries one grammar after the other. Ends, and is of no more use, with one that takes too much.

    Args:
        vocabulary: What texts are made of.
        limits: What a grammar may take.

    Raises:
        RuntimeError: The process does not start.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        self._limits = limits
        self._process = LineProcess([grammar_check.__file__], is_quiet=True)
        setup = {
            "tokens": [base64.b64encode(token).decode() for token in vocabulary.tokens],
            "end_ids": vocabulary.end_ids,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": int(limits.time_s) + 1,
        }
        if self._process.ask(json.dumps(setup), START_LIMIT_S) != "ready":
            self._process.close()
            raise RuntimeError("the process that checks grammars did not start")

    def check(self, grammar: str, is_ebnf: bool) -> str:
        """Returns a grammar in llguidance's form.

        Args:
            grammar: In that form, or
            is_ebnf: perhaps in llama.cpp's EBNF.

        Raises:
            ValueError: What is wrong with it, or that it takes more time, memory or stack than allowed.
        """
        start = time.monotonic()
        answer = self._process.ask(json.dumps({"grammar": grammar, "is_ebnf": is_ebnf}), self._limits.time_s)
        if answer:
            found: dict[str, str] = json.loads(answer)
            if "grammar" in found:
                return found["grammar"]
            raise ValueError(found["error"])
        if time.monotonic() - start >= self._limits.time_s:
            raise ValueError(f"it is too complex: not done within {self._limits.time_s:g} s")
        raise ValueError("it is too complex: it takes more memory or stack than allowed")

    def is_alive(self) -> bool:
        """Whether it can take another grammar."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Ends it at once, from any thread; a grammar in it fails."""
        self._process.kill()

    def close(self) -> None:
        """Ends it; not while another thread asks it something."""
        self._process.close()
