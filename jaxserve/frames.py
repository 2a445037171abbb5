"""Frames in which processes of one version send each other objects of the classes of a closed table.

A frame is a length of four bytes, big-endian, and a message in MessagePack. Both ends have the same table, so messages
need no schema: an object travels as its class's index in the table and its fields. Unlike a pickle, a frame cannot name
any other class, and plain values cannot pass for an object.
"""

import dataclasses
import enum
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgpack

HEADER = struct.Struct(">I")


class FrameError(ValueError):
    """A message that cannot be sent or received: too long, or with a value that MessagePack cannot hold."""


class Form(NamedTuple):
    """How objects of a class travel: how they become a value that MessagePack holds, and again an object."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def enum_form(cls: type[enum.Enum]) -> Form:
    """Return the form of an enumeration: the value of its member."""
    return Form(lambda member: member.value, cls)


def dataclass_form(cls: type[Any]) -> Form:
    """Return the form of a dataclass: the list of its fields, whose values its sender has checked."""
    names = [each.name for each in dataclasses.fields(cls)]

    def read(values: list[Any]) -> Any:
        made = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return Form(lambda value: [getattr(value, name) for name in names], read)


class Codec:
    """Packs and unpacks messages of the classes of a table.

    Args:
        forms: How the objects of each class travel. Both ends have the same classes in the same order.
    """

    def __init__(self, forms: Mapping[type, Form]):
        self._forms = dict(forms)
        self._classes = tuple(forms)
        self._marks = {cls: msgpack.ExtType(code, b"") for code, cls in enumerate(self._classes)}

    def pack(self, message: Any, limit_bytes: int) -> bytes:
        """Return a message as a frame.

        Raises:
            FrameError: The message is too long, or holds a value that cannot be sent.
        """
        try:
            body = msgpack.Packer(default=self._as_map, strict_types=True).pack(message)
        except (TypeError, ValueError, OverflowError) as error:  # such as a lone surrogate, large number or deep lists
            raise FrameError(f"{type(message).__name__} holds a value that cannot be sent: {error}") from error
        return HEADER.pack(check_length(len(body), limit_bytes)) + body

    def unpack(self, body: bytes) -> Any:
        """Return the message of a frame.

        Raises:
            FrameError: The bytes are not a message.
        """
        hooks: dict[str, Any] = {"ext_hook": self._class_of, "object_pairs_hook": self._from_pairs}
        try:
            return msgpack.unpackb(body, strict_map_key=False, **hooks)
        except Exception as error:  # whatever a class makes of fields that are not its own
            raise FrameError(f"{len(body)} bytes are not a message: {error}") from error

    def _as_map(self, value: Any) -> dict[Any, Any]:
        """Return an object as a map from its class's mark, which nothing else can contain, to its form."""
        cls = type(value)
        if cls not in self._forms:
            raise TypeError(f"objects of {cls.__name__} cannot be sent")
        return {self._marks[cls]: self._forms[cls].write(value)}

    def _class_of(self, code: int, data: bytes) -> type:
        del data
        return self._classes[code]

    def _from_pairs(self, pairs: list[tuple[Any, Any]]) -> Any:
        """Build an object or a plain dictionary."""
        if len(pairs) != 1 or not isinstance(pairs[0][0], type):
            return dict(pairs)
        cls, written = pairs[0]
        return self._forms[cls].read(written)


def check_length(num_bytes: int, limit_bytes: int) -> int:
    """Return the length of a frame's message.

    Raises:
        FrameError: It is too long.
    """
    if num_bytes > limit_bytes:
        raise FrameError(f"a message of {num_bytes} bytes is too long; the limit is {limit_bytes} bytes")
    return num_bytes
