"""Long lists in JSON: made, encoded and sent part by part, so that no response holds up the event loop."""

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.text_files import escape_line_ends
from jaxserve.api.turns import Turn
from jaxserve.server.http_api.responses import ENCODER_OPTIONS, json_text
from jaxserve.server.long_work import LongWork

ITEMS_AT_ONCE = 4096
"""Numbers or texts of a list that are made and encoded at once."""
_PIECE_CHARACTERS = 1 << 16
"""Pieces are joined until they are so long."""


@dataclasses.dataclass(frozen=True, eq=False)
class LongList:
    """A list of a response whose items are made while it is written.

    Attributes:
        parts: Makes the items, a list with some of them at a time.
    """

    parts: Callable[[], Iterator[list[Any]]]


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the compact JSON of a value that may hold ``LongList``s, in pieces."""
    pieces, num_characters = list[str](), 0
    for text in _texts(value):
        pieces.append(text)
        num_characters += len(text)
        if num_characters >= _PIECE_CHARACTERS:
            yield "".join(pieces).encode("utf-8", "replace")
            pieces, num_characters = [], 0
    if pieces:
        yield "".join(pieces).encode("utf-8", "replace")


def _texts(value: Any) -> Iterator[str]:
    found, mark = list[LongList](), secrets.token_hex(16)  # which no client can put into a text

    def place(item: Any) -> str:
        if not isinstance(item, LongList):
            raise TypeError(f"a response cannot have a {type(item).__name__}")
        found.append(item)
        return mark

    encoded = json.JSONEncoder(**ENCODER_OPTIONS, default=place).encode(value)
    begin, *others = escape_line_ends(encoded).split(f'"{mark}"')
    yield begin
    for each, following in zip(found, others, strict=True):
        separator = "["
        for part in each.parts():
            if part:
                yield separator + json_text(part)[1:-1]
                separator = ","
        yield ("[]" if separator == "[" else "]") + following


def in_parts(items: Sequence[Any]) -> Any:
    """Return a list of plain items as it can stand in a response: a ``LongList`` if it is long."""

    def parts() -> Iterator[list[Any]]:
        for start in range(0, len(items), ITEMS_AT_ONCE):
            yield list(items[start : start + ITEMS_AT_ONCE])

    return LongList(parts) if len(items) > ITEMS_AT_ONCE else list(items)


async def long_response(value: Any, headers: Mapping[str, str], threads: LongWork, turn: Turn) -> ASGIApp:
    """Return the JSON response of a value that may hold ``LongList``s: made on threads, and sent as it is made.

    Args:
        value: The value.
        headers: Headers of the response.
        threads: Where it is made.
        turn: Whose turn that takes.
    """
    pieces = json_pieces(value)
    first, second = await threads.run(turn, lambda: (next(pieces), next(pieces, None)))
    if second is None:
        return Response(first, 200, dict(headers), "application/json")

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive  # ``Endpoint`` watches for a client that disconnects
        given = {"content-type": "application/json", **headers}
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        piece, following = first, second
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = following
            following = None if piece is None else await threads.run(turn, next, pieces, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_all
