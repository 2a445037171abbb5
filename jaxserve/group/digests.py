"""Digests by which the processes of a group notice that they no longer compute the same."""

import hashlib
from array import array
from collections.abc import Sequence

from jaxserve.device.runner_interface import StepResult

_BYTES = 8


class Digests:
    """The digest of all steps so far, each of its plans and its tokens."""

    def __init__(self):
        self._latest = b""

    def add(self, plans: bytes, results: Sequence[StepResult]) -> bytes:
        """Add the oldest step that was not added yet; return the digest."""
        digest = hashlib.blake2b(self._latest, digest_size=_BYTES)
        digest.update(plans)
        for result in results:
            for tokens in result.tokens:
                digest.update(array("i", [len(tokens), *tokens]).tobytes())
        self._latest = digest.digest()
        return self._latest
