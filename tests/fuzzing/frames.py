"""What a frame's bytes may do to its reader."""

from collections.abc import Callable
from typing import Any

from jaxserve.frames import HEADER, FrameError


def check_frame(data: bytes, unpack: Callable[[bytes], Any], pack: Callable[[Any], bytes]) -> None:
    """Read a message, and if it is one, compare it with what arrives when it is sent again."""
    try:
        message = unpack(data)
    except ValueError:
        return
    try:
        frame = pack(message)[HEADER.size :]
    except (FrameError, AttributeError):  # a field of another class: senders check theirs, receivers trust them
        return
    assert pack(unpack(frame))[HEADER.size :] == frame
