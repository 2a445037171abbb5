"""Tool calls written as JSON objects with a name and arguments."""

import json
from collections.abc import Callable, Collection

from jaxserve.parsers.call_reader import CallReader
from jaxserve.parsers.json_scanner import JsonScanner, whole_json
from jaxserve.parsers.source import MAX_NAME_LENGTH, NotACall, Reading

ARGUMENT_KEYS = ("arguments", "parameters")


class CallObjectReader:
    """Reads calls that are JSON objects, or whose arguments are.

    Args:
      reader: The reader.
      name_key: The key of the name in an object.
    """

    def __init__(self, reader: CallReader, name_key: str = "name") -> None:
        self._reader = reader
        self._name_key = name_key
        self._source = reader.source
        self._message = reader.message

    def read_value(self, emit: Callable[[str], None]) -> Reading[None]:
        """Pass on one JSON value.

        Raises:
          NotACall: It is malformed or truncated.
        """
        scanner = JsonScanner()
        while not scanner.is_done:
            if not (yield from self._source.peek()):
                raise NotACall
            count, text = scanner.take(self._source.rest())
            self._source.advance(count)
            emit(text)
            if scanner.is_broken:
                raise NotACall

    def read_arguments(self) -> Reading[None]:
        """Read and pass on the arguments of the open call, and close the call."""
        yield from self.read_value(self._message.add_arguments)
        self._message.close_call(is_complete=True)

    def read_named(self, name: str, call_id: str | None = None) -> Reading[None]:
        """Read the arguments of a function, an object, and open its call."""
        if (yield from self._source.peek_past_space()) != "{":
            raise NotACall
        self._reader.open(name, call_id)
        yield from self.read_arguments()

    def read_object(self) -> Reading[None]:
        """Read one object."""
        yield from self._source.expect("{")
        yield from self.read_call()

    def read_keyed(self) -> Reading[None]:
        """Read one object whose key is the name and whose value has the arguments."""
        yield from self._source.expect("{")
        name = yield from self._read_text(is_name=True)
        yield from self._source.expect(":")
        yield from self._source.peek_past_space()
        yield from self._read_call_arguments(name)
        yield from self._source.expect("}")

    def read_call(self, *, keys: Collection[str] | None = None, needs_arguments: bool = False) -> Reading[None]:
        """Read one object whose opening brace was already taken.

        Args:
          keys: The keys that a call may have besides name and arguments; None allows any.
          needs_arguments: Whether an object without arguments is not a call; otherwise its arguments are {}.
        """
        source = self._source
        name, early, is_opened, is_first = "", "", False, True
        while not (is_first and (yield from source.peek_past_space()) == "}"):
            key = yield from self._read_text()
            yield from source.expect(":")
            yield from source.peek_past_space()
            if key == self._name_key and not name:
                name = yield from self._read_text(is_name=True)
                if early:
                    self._give(name, early)
                    is_opened = True
            elif key in ARGUMENT_KEYS and not is_opened and not early:
                early = yield from self._read_call_arguments(name)
                is_opened = bool(name)
            elif keys is None or key in keys or is_opened:
                yield from self.read_value(_ignore)
            else:
                raise NotACall
            is_first = False
            if (yield from source.peek_past_space()) != ",":
                break
            source.advance(1)
        yield from source.expect("}")
        if not is_opened:
            if needs_arguments or early or not name:
                raise NotACall
            self._give(name, "{}")

    def _read_call_arguments(self, name: str) -> Reading[str]:
        """Open the call and pass its arguments on; return them instead while the name is not known."""
        if name and (yield from self._source.peek()) == "{":
            self._reader.open(name)
            yield from self.read_arguments()
            return ""
        parts: list[str] = []
        yield from self.read_value(parts.append)
        arguments = _as_object("".join(parts))
        if name:
            self._give(name, arguments)
        return arguments

    def _give(self, name: str, arguments: str) -> None:
        self._reader.open(name)
        self._message.add_arguments(arguments)
        self._message.close_call(is_complete=True)

    def _read_text(self, *, is_name: bool = False) -> Reading[str]:
        """Read a short JSON string; a tool's name has no white space and no tag."""
        yield from self._source.expect('"')
        written = '"'
        while True:
            character = yield from self._source.peek()
            if (
                not character
                or len(written) > MAX_NAME_LENGTH
                or (is_name and (character.isspace() or character in "<{"))
            ):
                raise NotACall
            self._source.advance(1)
            written += character
            if character == '"' and (len(written) - len(written[:-1].rstrip("\\"))) % 2:
                break
        try:
            text = str(json.loads(written))
        except ValueError as error:
            raise NotACall from error
        if is_name and not text:
            raise NotACall
        return text


def _as_object(written: str) -> str:
    """Convert arguments that are not an object: null means none, a string may contain the object's text."""
    if written == "null":
        return "{}"
    if written.startswith('"'):
        written = whole_json(str(json.loads(written)))
    if not written.startswith("{"):
        raise NotACall
    return written


def _ignore(_: str) -> None:
    """Discard text."""
