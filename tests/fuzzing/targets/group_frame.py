"""Messages in a group: any bytes are a message that can be sent again, or no message, before and after the secret."""

from jaxserve.frames import HEADER
from jaxserve.group.messages import (
    CODEC,
    MAX_BYTES,
    Agreed,
    Beat,
    Challenge,
    Done,
    End,
    Facts,
    Failed,
    Hello,
    Joined,
    Launch,
    Ready,
    Reset,
    Welcome,
)
from tests.fuzzing.frames import check_frame
from tests.fuzzing.target import Target

_MESSAGES = (
    *(Challenge(b"1" * 16), Hello(1, 2, "host", "machine", 3, b"2" * 16, b"3" * 32), Welcome(b"4" * 32), Joined(2)),
    *(Facts({"a": 1, "b": [1, "c"]}), Agreed({"a": 1}), Ready(), Launch(0, b"\x90"), Reset(), Done(1, b"5" * 8)),
    *(Beat(), Failed("error", False, "lines"), End("")),
)


def run(data: bytes) -> None:
    """Read a message; send what it says again."""
    check_frame(data, CODEC.unpack, lambda message: CODEC.pack(message, MAX_BYTES))


TARGET = Target(
    run,
    seeds=tuple(CODEC.pack(message, MAX_BYTES)[HEADER.size :] for message in _MESSAGES),
    words=(b"\x81\xd4\1\0", b"\xc7\0\1", b"\xc7\0\x20", b"\x90", b"\x80", b"\xc0", b"\xc4\1a", b"\xdd\xff\xff\xff\xff"),
    packages=("jaxserve.frames", "jaxserve.group.messages"),
)
