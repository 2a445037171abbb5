"""What a text's next token must keep to, where that depends on the tokens before it."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Constraint(Protocol):
    """One text's rule, and how far the text has got in it.

    A sequence with a constraint samples only when all its tokens are known to the host: it sits out every other step
    while steps overlap.
    """

    def mask(self) -> bytes | None:
        """Tokens allowed next, as bits (see ``SlotMask``); None allows all."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the next token; returns whether the text is complete with it and ends."""
        ...
