"""What chat templates see of a message's content: one text, or a list of parts as in OpenAI's API."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, cast

from jinja2 import nodes

from jaxserve.chat_messages import part_text
from jaxserve.errors import RequestError

Found = Literal["string", "openai"]

FORMATS = ("auto", "string", "openai")
"""``auto`` is the one that the template is written for."""
_PART_KEYS = ("type", "text")


def check_format(value: Any) -> str:
    """One of ``FORMATS``.

    Raises:
      RequestError: Something else.
    """
    if value not in FORMATS:
        name = "chat_template_content_format"
        raise RequestError(f"{name} must be one of {', '.join(FORMATS)}, got {value!r:.80}", parameter=name)
    return value


def in_format(role: str, content: Any, content_format: Found) -> str | list[dict[str, str]]:
    """A message's content as a template is to see it.

    Args:
      role: The message's. What a tool gave is one text in both formats, as in vLLM: few templates know it otherwise.
      content: Text, parts with texts, or None.
      content_format: ``string``: texts joined by newlines; ``openai``: a list with a part for each.
    """
    parts = [content] if isinstance(content, str) else cast("list[Any]", content or [])
    texts = [part_text(part) or "" for part in parts]
    if content_format == "string" or role == "tool":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def detected_format(template: nodes.Template) -> Found:
    """``openai`` for a parsed template that loops over the content of a message, ``string`` for all others."""
    names = _Names(template)
    return "openai" if any(names.is_over_parts(loop) for loop in template.find_all(nodes.For)) else "string"


class _Names:
    """Variables of a template that may hold lists of messages, messages, and contents; scopes do not matter."""

    def __init__(self, template: nodes.Template):
        self._lists, self._messages, self._contents = {"messages"}, set[str](), set[str]()
        bound = [(one.target, one.node, False) for one in template.find_all(nodes.Assign)]
        bound += [(one.target, one.iter, True) for one in template.find_all(nodes.For)]
        named = [(target.name, node, is_loop) for target, node, is_loop in bound if isinstance(target, nodes.Name)]
        num_known = 0
        while num_known < self._num_known():
            num_known = self._num_known()
            for name, node, is_loop in named:
                self._note(name, node, is_loop)

    def is_over_parts(self, loop: nodes.For) -> bool:
        """Whether a loop is over a content; over a variable, which may hold other things, only if it is as over parts.

        Mistral's templates for one read lists of calls from ``content`` too.
        """
        sources = list(_made_of(loop.iter))
        if any(self._is_content(one) for one in sources):
            return True
        is_named = any(_is_name(one, self._contents) for one in sources)
        return is_named and isinstance(loop.target, nodes.Name) and _is_used_as_part(loop.target.name, loop.body)

    def _note(self, name: str, node: nodes.Node, is_loop: bool) -> None:
        for one in _made_of(node):
            if _is_name(one, self._lists):
                (self._messages if is_loop else self._lists).add(name)
            elif is_loop:
                continue
            elif self._is_message(one):
                self._messages.add(name)
            elif self._is_content(one) or _is_name(one, self._contents):
                self._contents.add(name)

    def _is_message(self, node: nodes.Node) -> bool:
        is_item = isinstance(node, nodes.Getitem) and _is_name(node.node, self._lists)
        return is_item or _is_name(node, self._messages)

    def _is_content(self, node: nodes.Node) -> bool:
        """Whether an expression is a message's content: ``m.content``, ``m['content']`` or ``m.get('content')``."""
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            return bool(node.args) and _is_constant(node.args[0], "content") and self._is_message(node.node.node)
        owner = _owner(node, "content")
        return owner is not None and self._is_message(owner)

    def _num_known(self) -> int:
        return len(self._lists) + len(self._messages) + len(self._contents)


def _made_of(node: nodes.Node) -> Iterator[nodes.Node]:
    """The expressions that a list may come from: without filters, slices, choices and sums."""
    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        inner = [node.node]
    elif isinstance(node, nodes.CondExpr):
        inner = [node.expr1, node.expr2]
    elif isinstance(node, nodes.Add | nodes.Or):
        inner = [node.left, node.right]
    else:
        yield node
        return
    for one in inner:
        if one is not None:
            yield from _made_of(one)


def _is_used_as_part(name: str, body: Sequence[nodes.Node]) -> bool:
    """Whether a part's type or text is asked for."""
    found = [one for node in body for one in (node, *node.find_all((nodes.Getattr, nodes.Getitem)))]
    owners = (_owner(one, key) for one in found for key in _PART_KEYS)
    return any(owner is not None and _is_name(owner, {name}) for owner in owners)


def _owner(node: nodes.Node, key: str) -> nodes.Expr | None:
    """What a key or attribute is taken of; None where the expression takes no such one."""
    if isinstance(node, nodes.Getitem):
        return node.node if _is_constant(node.arg, key) else None
    return node.node if isinstance(node, nodes.Getattr) and node.attr == key else None


def _is_name(node: nodes.Node, names: Collection[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _is_constant(node: nodes.Node, value: str) -> bool:
    return isinstance(node, nodes.Const) and node.value == value
