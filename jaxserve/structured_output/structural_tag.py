"""Writes structural tags in their present form as grammars: ``{"type": "structural_tag", "format": {…}}``.

A format is a tree; its types and fields are those that xgrammar documents and vLLM passes on. Text that may be anything
ends where its follower begins, so `TagWriter.write` writes a format together with the strings that end it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jaxserve.api.errors import RequestError
from jaxserve.structured_output.parameter_tags import ParameterTags
from jaxserve.structured_output.structural_tag_fields import FIELDS, NO_LIMIT, REQUIRED, Format

Ends = tuple[str, ...]
"""Strings one of which ends a text; none: the output ends, or a token follows."""

UNLIMITED = frozenset(("any_text", "triggered_tags", "dispatch"))
"""Types whose text goes on until a string ends it."""
_PASSES_ENDS = frozenset(("sequence", "or", "tag"))
_QUANTIFIERS = {"optional": "?", "star": "*", "plus": "+"}
"""Types that may end with a format that goes on until a string ends it."""


class TagWriter:
    """Writes one structural tag.

    Args:
        write_schema: Checks a JSON schema, with more options for white space, and returns it as JSON.
        token_ids: Special tokens by name.
        make_error: Makes the error of the request from a message.

    Attributes:
        named: Grammars in Lark or EBNF notation, by the names that rules call them.
    """

    def __init__(
        self,
        write_schema: Callable[[Any, Mapping[str, Any]], str],
        token_ids: Mapping[str, int],
        make_error: Callable[[str], RequestError],
    ):
        self._write_schema = write_schema
        self._token_ids = token_ids
        names = sorted(filter(None, token_ids), key=len, reverse=True)
        self._token_names = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._error = make_error
        self._rules: list[str] = []
        self.named: dict[str, str] = {}

    def grammar(self, described: Any) -> str:
        """Return the grammar of a format and what is inside it.

        Raises:
            RequestError: A type, a field or a value that is unknown or cannot be enforced.
        """
        start = self.write(described)
        return "\n".join(["%llguidance {}", "ALL: /(?s:.*)/", *self._rules, f"start: {start or _EMPTY}"])

    def write(self, described: Any, ends: Ends = (), end_token: int | None = None) -> str:
        """Return an expression for a format and one of the strings that end it.

        Args:
            described: The format.
            ends: The strings after it; () if there are none.
            end_token: The token after it, which the expression does not include.
        """
        kind = described.get("type") if isinstance(described, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise self._error(f"has a format of type {kind!r:.60}; supported types: {', '.join(FIELDS)}")
        values = self._values(kind, cast("Format", described))
        if kind in _QUANTIFIERS:
            return self._followed(f"({self._closed(kind, values['content'])}){_QUANTIFIERS[kind]}", ends)
        if kind in UNLIMITED:
            return getattr(self, f"_{kind}")(values, ends)
        if kind in _PASSES_ENDS:
            return getattr(self, f"_{kind}")(values, ends, end_token)
        if kind in ("any_tokens", "exclude_token", "token_triggered_tags", "token_dispatch") and end_token is not None:
            values["exclude_tokens"] = [*values["exclude_tokens"], end_token]
        return self._followed(getattr(self, f"_{kind}")(values), ends)

    def _values(self, kind: str, described: Format) -> dict[str, Any]:
        """Return the fields of a format with defaults, after checking names and types."""
        fields = FIELDS[kind]
        for name in described:
            if name != "type" and name not in fields:
                raise self._error(f"has a {kind} with the field {name!r:.60}; supported fields: {', '.join(fields)}")
        values: dict[str, Any] = {}
        for name, (default, is_right, expected) in fields.items():
            value = described.get(name)
            if value is None and default is not REQUIRED:
                value = default
            elif not is_right(value):
                raise self._error(f"has a {kind} whose {name} is {value!r:.60}; expected {expected}")
            values[name] = value
        return values

    # ------------------------------------------------------------------------------------------------------- primitives

    def _const_string(self, values: dict[str, Any]) -> str:
        return self._literal(values["value"])

    def _json_schema(self, values: dict[str, Any]) -> str:
        if values["style"] != "json":
            return self._parameters(values["json_schema"])
        count, options = values["max_whitespace_cnt"], dict[str, Any]()
        if count is not None:
            options = {"whitespace_pattern": rf"[ \t\n\r]{{1,{count}}}"} if count else {"whitespace_flexible": False}
        return f"%json {self._write_schema(values['json_schema'], options)}"

    def _qwen_xml_parameter(self, values: dict[str, Any]) -> str:
        return self._parameters(values["json_schema"])

    def _parameters(self, schema: Any) -> str:
        tags = ParameterTags(lambda inner: self._write_schema(inner, {}), lambda end: self._text_until((), (end,)))
        return tags.write(schema, self._error)

    def _grammar(self, values: dict[str, Any]) -> str:
        name = f"grammar_{len(self.named)}"
        self.named[name] = values["grammar"]
        return f"@{name}"

    def _regex(self, values: dict[str, Any]) -> str:
        pattern = values["pattern"].removeprefix("^")
        if pattern.endswith("$") and not pattern.endswith("\\$"):
            pattern = pattern[:-1]
        return self._rule(f"/{_slashes_escaped(pattern)}/", is_terminal=True) if pattern else ""

    def _any_text(self, values: dict[str, Any], ends: Ends) -> str:
        return self._text_until(values["excludes"], ends, values["max_chars"])

    def _text_until(self, excludes: Sequence[str], ends: Ends, max_chars: int | None = None) -> str:
        """Return an expression for text without some strings, up to and with the first of the strings that end it."""
        text = self._text(excludes, max_chars)
        return self._up_to(text, ends) if ends else text

    def _up_to(self, text: str, ends: Ends) -> str:
        """Return an expression for the text of a terminal up to and with the first of some strings."""
        found: list[str] = []
        for end in ends:
            first, *rest = self._parts(end)
            if first.startswith("<"):
                head = f"{text} {first}"  # no text has a token
            else:
                head = self._rule(f"{text} {first}", is_terminal=bool(rest), options="" if rest else "[lazy]")
            found.append(_joined(head, *rest))
        return found[0] if len(found) == 1 else _one_of(found)

    def _text(self, excludes: Sequence[str], max_chars: int | None = None) -> str:
        """Return the terminal of text without some strings."""
        text = "ALL" if max_chars is None else f"/(?s:.){{0,{max_chars}}}/"
        if excludes:
            text = f"{text} & ~(ALL ({_any_of(excludes)}) ALL)"
        return text if text == "ALL" else self._rule(text, is_terminal=True)

    # ------------------------------------------------------------------------------------------------------ composition

    def _sequence(self, values: dict[str, Any], ends: Ends, end_token: int | None) -> str:
        elements: list[Any] = values["elements"]
        parts: list[str] = []
        begun = 0
        for index, element in enumerate(elements):
            if index == len(elements) - 1:
                parts.append(self._after(element, begun, ends, end_token))
                break
            follower = elements[index + 1]
            first = _first_string(follower) if self._is_open(element) else None
            if first is None and self._is_open(element):
                kind = follower.get("type") if isinstance(follower, dict) else follower
                message = f"has an any_text or free text before a {kind!r:.40}; only const_string and tag can end it"
                raise self._error(message)
            parts.append(self._after(element, begun, () if first is None else (first,), None))
            begun = 0 if first is None else len(first)
        return " ".join(filter(None, parts)) if elements else self._followed("", ends)

    def _after(self, element: Any, begun: int, ends: Ends, end_token: int | None) -> str:
        """Write an element of a sequence whose first characters the element before it has written."""
        if begun and element["type"] == "const_string":
            return self._followed(self._literal(element["value"][begun:]), ends)
        if begun:
            return self._tag(self._values("tag", {**element, "begin": ""}), ends, end_token)
        return self.write(element, ends, end_token)

    def _or(self, values: dict[str, Any], ends: Ends, end_token: int | None) -> str:
        return _one_of([self.write(element, ends, end_token) for element in values["elements"]])

    def _repeat(self, values: dict[str, Any]) -> str:
        least, most = values["min"], values["max"]
        if most != NO_LIMIT and most < least:
            raise self._error(f"has a repeat whose max={most} is below min={least}")
        limits = f"{least}," if most == NO_LIMIT else f"{least},{most}"
        return f"({self._closed('repeat', values['content'])}){{{limits}}}"

    def _closed(self, kind: str, content: Any) -> str:
        """Write what is repeated: nothing in it may go on until a string ends it."""
        if self._is_open(content):
            raise self._error(f"has a {kind} of free text, which has no end; put it into a tag with an end")
        return self.write(content) or _EMPTY

    def _is_open(self, described: Any) -> bool:
        """Whether a format may end with free text."""
        if not isinstance(described, dict):
            return False
        one = cast("Format", described)
        kind = one.get("type")
        if kind == "tag":
            return one.get("end") == "" and self._is_open(one.get("content"))
        if kind == "sequence":
            return isinstance(one.get("elements"), list) and any(self._is_open(item) for item in one["elements"][-1:])
        if kind == "or":
            return isinstance(one.get("elements"), list) and any(map(self._is_open, one["elements"]))
        return kind in UNLIMITED

    # -------------------------------------------------------------------------------------------------- tags and tokens

    def _tag(self, values: dict[str, Any], ends: Ends, end_token: int | None) -> str:
        begin, end, content = values["begin"], values["end"], values["content"]
        head = self._literal(begin) if isinstance(begin, str) else self._token_format(begin)
        if isinstance(end, dict):
            token = self._token_id(self._values("token", cast("Format", end))["token"])
            return self._followed(_joined(head, self.write(content, (), token), f"<[{token}]>"), ends)
        own = tuple(cast("list[str]", end)) if isinstance(end, list) else (end,)
        if own == ("",):  # what follows the tag ends its content
            return _joined(head, self.write(content, ends, end_token))
        if not own or "" in own:
            raise self._error(f"has a tag whose end is {end!r:.60}; expected a string, or a list of filled strings")
        return self._followed(_joined(head, self.write(content, own)), ends)

    def _triggered_tags(self, values: dict[str, Any], ends: Ends) -> str:
        tags = [self._values("tag", tag) for tag in values["tags"]]
        rules: list[tuple[str, str]] = []
        for tag in tags:
            begin = tag["begin"]
            found = [text for text in values["triggers"] if isinstance(begin, str) and begin.startswith(text)]
            if not found:
                triggers = values["triggers"]
                raise self._error(
                    f"has a tag with begin={begin!r:.60}, which starts with none of the triggers {triggers}"
                )
            trigger = self._whole_token(begin, found[0])
            rules.append((trigger, self._tag({**tag, "begin": begin[len(trigger) :]}, (), None)))
        first = _one_of([self._tag(tag, (), None) for tag in tags]) if values["at_least_one"] else None
        return self._free_text(rules, values["excludes"], ends, not values["stop_after_first"], first)

    def _dispatch(self, values: dict[str, Any], ends: Ends) -> str:
        rules = [(pattern, self._closed("dispatch", content)) for pattern, content in values["rules"]]
        return self._free_text(rules, values["excludes"], ends, values["loop"], None)

    def _free_text(
        self, rules: list[tuple[str, str]], excludes: Sequence[str], ends: Ends, loops: bool, first: str | None
    ) -> str:
        """Write free text in which strings lead into expressions.

        Args:
            rules: The strings, and what follows each.
            excludes: Strings that the free text lacks.
            ends: Strings that end it.
            loops: Whether free text may follow the first expression.
            first: What stands at the beginning, in place of free text; None for free text.
        """
        text = self._text(excludes)
        heads = [(self._up_to(text, (trigger,)), rest) for trigger, rest in rules]
        branches = _one_of([_joined(head, rest) for head, rest in heads])
        tail = self._text_until(excludes, ends)
        if loops:
            return _joined(first or "", f"({branches})* {tail}")
        return self._followed(first, ends) if first is not None else _one_of([self._followed(branches, ends), tail])

    def _tags_with_separator(self, values: dict[str, Any]) -> str:
        tag = _one_of([self._closed("tags_with_separator", one) for one in values["tags"]])
        repeated = f"({_joined(self._literal(values['separator']), tag)})*"
        whole = tag if values["stop_after_first"] else f"{tag} {repeated}"
        return whole if values["at_least_one"] else f"({whole})?"

    def _token(self, values: dict[str, Any]) -> str:
        return f"<[{self._token_id(values['token'])}]>"

    def _token_format(self, described: Format) -> str:
        return self._token(self._values("token", described))

    def _exclude_token(self, values: dict[str, Any]) -> str:
        return self._other_tokens(values["exclude_tokens"])

    def _any_tokens(self, values: dict[str, Any]) -> str:
        most = values["max_tokens"]
        return self._other_tokens(values["exclude_tokens"]) + ("*" if most is None else f"{{0,{most}}}")

    def _token_triggered_tags(self, values: dict[str, Any]) -> str:
        tags = [self._values("tag", tag) for tag in values["tags"]]
        triggers = [self._token_id(token) for token in values["trigger_tokens"]]
        for tag in tags:
            begin = tag["begin"]
            token = None if isinstance(begin, str) else self._token_id(self._values("token", begin)["token"])
            if token not in triggers:
                raise self._error(f"has a tag with begin={begin!r:.60}, which is none of the trigger_tokens")
        branches = _one_of([self._tag(tag, (), None) for tag in tags])
        first = branches if values["at_least_one"] else None
        return self._free_tokens(
            [*triggers, *values["exclude_tokens"]], branches, not values["stop_after_first"], first
        )

    def _token_dispatch(self, values: dict[str, Any]) -> str:
        rules = [(self._token_id(token), self._closed("token_dispatch", content)) for token, content in values["rules"]]
        branches = _one_of([f"<[{token}]> {content}" for token, content in rules])
        excludes = [*(token for token, _ in rules), *values["exclude_tokens"]]
        return self._free_tokens(excludes, branches, values["loop"], None)

    def _free_tokens(self, excludes: Sequence[int | str], branches: str, loops: bool, first: str | None) -> str:
        """Write free tokens in which some tokens lead into expressions; as ``_free_text``."""
        free = f"{self._other_tokens(excludes)}*"
        if loops:
            return _joined(first or "", f"({free} {branches})* {free}")
        return first if first is not None else f"{free} ({branches})?"

    def _other_tokens(self, excludes: Sequence[int | str]) -> str:
        ids = sorted({self._token_id(token) for token in excludes})
        return f"<[^{','.join(map(str, ids))}]>" if ids else "<[*]>"

    def _token_id(self, token: int | str) -> int:
        if isinstance(token, int):
            return token
        if token not in self._token_ids:
            raise self._error(f"has the token {token!r:.60}, which is no special token of the model; give its id")
        return self._token_ids[token]

    def _whole_token(self, begin: str, trigger: str) -> str:
        """Return the trigger, or the special token at the beginning of a tag that it is a part of."""
        names = [name for name in self._token_ids if begin.startswith(name) and len(name) > len(trigger)]
        return max([trigger, *names], key=len)

    def _parts(self, text: str) -> list[str]:
        """Return a string as expressions: special tokens in it are those tokens, as the model writes them."""
        parts = self._token_names.split(text) if self._token_names else [text]
        # The pattern has one group, so every second part is a special token.
        return [
            f"<[{self._token_ids[part]}]>" if index % 2 else json.dumps(part)
            for index, part in enumerate(parts)
            if part
        ]

    def _literal(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _followed(self, expression: str, ends: Ends) -> str:
        return _joined(expression, _one_of([self._literal(end) for end in ends]) if ends else "")

    def _rule(self, body: str, options: str = "", is_terminal: bool = False) -> str:
        name = f"{'TEXT' if is_terminal else 'text'}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


_EMPTY = '""'


def _any_of(texts: Sequence[str]) -> str:
    return " | ".join(json.dumps(text) for text in texts)


def _one_of(parts: Sequence[str]) -> str:
    return f"({' | '.join(part or _EMPTY for part in parts)})"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _first_string(described: Any) -> str | None:
    """Return the string with which a format begins; None if it may begin with others."""
    kind = described.get("type") if isinstance(described, dict) else None
    found = described.get({"const_string": "value", "tag": "begin"}.get(kind or "", ""), None) if kind else None
    return found if isinstance(found, str) and found else None


def _slashes_escaped(pattern: str) -> str:
    """Escape what would end a regular expression between slashes."""
    parts: list[str] = []
    is_escaped = False
    for character in pattern:
        parts.append("\\/" if character == "/" and not is_escaped else "\\n" if character == "\n" else character)
        is_escaped = character == "\\" and not is_escaped
    return "".join(parts)
