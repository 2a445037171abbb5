"""Convert message contents to the form a chat template expects: a string, or a list of parts as in OpenAI's API."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, cast

from jinja2 import nodes

from jaxserve.api.chat_messages import part_text
from jaxserve.api.errors import RequestError

ContentFormat = Literal["string", "openai"]

FORMATS = ("auto", "string", "openai")
"""Accepted values; ``auto`` detects the template's format."""
_PART_KEYS = ("type", "text")


def check_format(value: Any) -> str:
    """Return ``value`` if it is one of ``FORMATS``.

    Raises:
      RequestError: It is not.
    """
    if value not in FORMATS:
        name = "chat_template_content_format"
        raise RequestError(f"{name} must be one of {', '.join(FORMATS)}, got {value!r:.80}", parameter=name)
    return value


def convert_content(role: str, content: Any, content_format: ContentFormat) -> str | list[dict[str, str]]:
    """Convert a message's content for a template.

    Args:
      role: Role of the message. Tool results are strings in both formats, as in vLLM and as most templates expect.
      content: Text, text parts, or None.
      content_format: ``string`` joins texts with newlines; ``openai`` is a list with a part for each text.
    """
    parts = [content] if isinstance(content, str) else cast("list[Any]", content or [])
    texts = [part_text(part) or "" for part in parts]
    if content_format == "string" or role == "tool":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def detect_format(template: nodes.Template) -> ContentFormat:
    """Return ``openai`` if a parsed template loops over the content of a message, else ``string``."""
    variables = _Variables(template)
    return "openai" if any(variables.is_over_parts(loop) for loop in template.find_all(nodes.For)) else "string"


def asks_for_null(template: nodes.Template) -> bool:
    """Whether a parsed template tests if the content of a message is null, as that of a message with calls may be."""
    variables = _Variables(template)
    tested = [test.node for test in template.find_all(nodes.Test) if test.name == "none"]
    for comparison in template.find_all(nodes.Compare):
        if any(_is_null(operand.expr) for operand in comparison.ops):
            tested.append(comparison.expr)
    return any(variables.is_content(node) for node in tested)


class _Variables:
    """Variables of a template that may hold lists of messages, messages, or contents; ignores scopes."""

    def __init__(self, template: nodes.Template):
        self._lists, self._messages, self._contents = {"messages"}, set[str](), set[str]()
        bound = [(assign.target, assign.node, False) for assign in template.find_all(nodes.Assign)]
        bound += [(loop.target, loop.iter, True) for loop in template.find_all(nodes.For)]
        named = [(target.name, node, is_loop) for target, node, is_loop in bound if isinstance(target, nodes.Name)]
        num_known = 0
        while num_known < self._num_known():
            num_known = self._num_known()
            for name, node, is_loop in named:
                self._add(name, node, is_loop)

    def is_over_parts(self, loop: nodes.For) -> bool:
        """Whether a loop is over the parts of a content.

        A loop over a variable counts only if it uses items as parts: variables may hold other lists too, such as the
        tool calls in Mistral's templates.
        """
        sources = list(_sources(loop.iter))
        if any(self._is_content(source) for source in sources):
            return True
        is_named = any(_is_name(source, self._contents) for source in sources)
        return is_named and isinstance(loop.target, nodes.Name) and _is_used_as_part(loop.target.name, loop.body)

    def is_content(self, node: nodes.Node) -> bool:
        """Whether an expression is a message's content, or a variable that may hold one."""
        return self._is_content(node) or _is_name(node, self._contents)

    def _add(self, name: str, node: nodes.Node, is_loop: bool) -> None:
        for source in _sources(node):
            if _is_name(source, self._lists):
                (self._messages if is_loop else self._lists).add(name)
            elif is_loop:
                continue
            elif self._is_message(source):
                self._messages.add(name)
            elif self.is_content(source):
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


def _sources(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the expressions that a list may come from, looking through filters, slices, conditionals and sums."""
    if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        operands = [node.node]
    elif isinstance(node, nodes.CondExpr):
        operands = [node.expr1, node.expr2]
    elif isinstance(node, nodes.Add | nodes.Or):
        operands = [node.left, node.right]
    else:
        yield node
        return
    for operand in operands:
        if operand is not None:
            yield from _sources(operand)


def _is_used_as_part(name: str, body: Sequence[nodes.Node]) -> bool:
    """Whether the "type" or "text" of a variable is read."""
    reads = [read for node in body for read in (node, *node.find_all((nodes.Getattr, nodes.Getitem)))]
    owners = (_owner(read, key) for read in reads for key in _PART_KEYS)
    return any(owner is not None and _is_name(owner, {name}) for owner in owners)


def _owner(node: nodes.Node, key: str) -> nodes.Expr | None:
    """Return the object of an expression that reads the key or attribute ``key``, else None."""
    if isinstance(node, nodes.Getitem):
        return node.node if _is_constant(node.arg, key) else None
    return node.node if isinstance(node, nodes.Getattr) and node.attr == key else None


def _is_name(node: nodes.Node, names: Collection[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _is_null(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and node.value is None


def _is_constant(node: nodes.Node, value: str) -> bool:
    return isinstance(node, nodes.Const) and node.value == value
