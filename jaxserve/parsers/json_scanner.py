"""Recognizes one JSON value, a character at a time."""

import json
import re

MAX_DEPTH = 200
"""Deeper nesting is malformed, because readers of the arguments would fail on it."""

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}

# Numbers: state -> class of the next character -> state. States in _NUMBER_ENDS may end the number.
_NUMBER_STEPS: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "1": "whole"},
    "zero": {".": "point", "e": "exponent"},
    "whole": {"0": "whole", "1": "whole", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "exponent"},
    "exponent": {"0": "power", "1": "power", "+": "sign", "-": "sign"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_NUMBER_STARTS = {"-": "minus", "0": "zero", **dict.fromkeys("123456789", "whole")}
_NUMBER_ENDS = frozenset(["zero", "whole", "fraction", "power"])
_NUMBER_CLASSES = {**dict.fromkeys("123456789", "1"), "E": "e"}


class JsonScanner:
    """Scans one JSON value. Strict, except that a raw control character in a string is accepted and escaped."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state = "value"
        self._is_key = False
        self._pending: str = ""  # The rest of a literal, or one character for each missing digit of a \u escape.
        self._number = ""
        self.is_done = False
        self.is_broken = False

    def take(self, text: str) -> tuple[int, str]:
        """Scan the value through a text, up to its end or the first character that cannot be part of it.

        Returns:
          The number of characters that belong to the value, and these as valid JSON.
        """
        index = 0
        made: list[str] = []
        while index < len(text) and not self.is_done:
            if self._state == "string" and (run := _STRING_RUN.match(text, index)):
                made.append(run.group())
                index = run.end()
                continue
            character = text[index]
            output = self._step(character)
            if output is None:
                break
            made.append(output)
            index += 1
        return index, "".join(made)

    def _step(self, character: str) -> str | None:
        """Return the character as valid JSON; None when it is not part of the value."""
        if self._state == "number":
            kind = _NUMBER_CLASSES.get(character, character)
            if (following := _NUMBER_STEPS[self._number].get(kind)) is not None:
                self._number = following
                return character
            if self._number not in _NUMBER_ENDS:
                return self._broken()
            self._end_value()
            if self.is_done:
                return None
        if self._state == "string":
            return self._step_string(character)
        if self._state in ("literal", "escape", "unicode"):
            return self._step_inside(character)
        return self._step_outside(character)

    def _step_string(self, character: str) -> str:
        if character == '"':
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif character == "\\":
            self._state = "escape"
        elif character < " ":
            return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}"
        return character

    def _step_inside(self, character: str) -> str | None:
        if self._state == "escape":
            if character not in '"\\/bfnrtu':
                return self._broken()
            self._state = "unicode" if character == "u" else "string"
            self._pending = "0000"
            return character
        expected = _HEX if self._state == "unicode" else self._pending[0]
        if character not in expected:
            return self._broken()
        self._pending = self._pending[1:]
        if not self._pending:
            if self._state == "unicode":
                self._state = "string"
            else:
                self._end_value()
        return character

    def _step_outside(self, character: str) -> str | None:
        if character in _SPACE:
            return character
        state = self._state
        if state in ("value", "first item") and self._begin_value(character):
            return character
        if state in ("key", "first key") and character == '"':
            self._state, self._is_key = "string", True
            return character
        if state == "colon" and character == ":":
            self._state = "value"
            return character
        if state == "after" and character == ",":
            self._state = "key" if self._stack[-1] == "}" else "value"
            return character
        if state in ("after", "first key", "first item") and character == self._stack[-1]:
            self._stack.pop()
            self._end_value()
            return character
        return self._broken()

    def _begin_value(self, character: str) -> bool:
        if character == '"':
            self._state, self._is_key = "string", False
        elif character in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if character == "{" else "]")
            self._state = "first key" if character == "{" else "first item"
        elif character in _LITERALS:
            self._state, self._pending = "literal", _LITERALS[character][1:]
        elif character in _NUMBER_STARTS:
            self._state, self._number = "number", _NUMBER_STARTS[character]
        else:
            return False
        return True

    def _end_value(self) -> None:
        self._state = "after"
        self.is_done = not self._stack

    def _broken(self) -> None:
        self.is_broken = True


def whole_json(text: str) -> str:
    """Return a text that is one JSON value as valid JSON, without surrounding white space; otherwise ""."""
    scanner = JsonScanner()
    text = text.strip()
    count, made = scanner.take(f"{text} ")  # a number has no terminator, so a space ends it.
    return made if scanner.is_done and count == len(text) else ""


def escaped(text: str) -> str:
    """Return a text as it is written inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
