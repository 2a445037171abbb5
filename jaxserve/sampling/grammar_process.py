"""The engine's end of the process that tries grammars out."""

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import time

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
        self._process = subprocess.Popen(
            # -P: the script's folder is not searched for modules.
            [sys.executable, "-P", grammar_check.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        setup = {
            "tokens": [base64.b64encode(token).decode() for token in vocabulary.tokens],
            "end_ids": vocabulary.end_ids,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": int(limits.time_s) + 1,
        }
        if self._ask(json.dumps(setup), START_LIMIT_S) != "ready":
            self.close()
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
        answer = self._ask(json.dumps({"grammar": grammar, "is_ebnf": is_ebnf}), self._limits.time_s)
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
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it at once, from any thread; a grammar in it fails."""
        self._process.kill()

    def close(self) -> None:
        """Ends it and gives its pipes back; not while another thread asks it something."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _ask(self, line: str, limit_s: float) -> str:
        """Sends a line and returns the answer; "" where the process ended, by itself or for being late."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline().decode().strip()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self._process.kill()
            self._process.wait()
        return answer
