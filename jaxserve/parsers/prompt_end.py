"""Finds out from a prompt whether its completion begins inside reasoning."""

import re

from jaxserve.api.chat_messages import OTHER_ROLES, LastMessage
from jaxserve.parsers.parser import reasoning_parser
from jaxserve.parsers.reasoning_format import ReasoningFormat

_ASSISTANTS = "assistant|model|chatbot|bot"
_OTHERS = "|".join(OTHER_ROLES)
_OPEN = r"(?:<[|｜](?:im_start|start_header_id|header_start|start_of_role|start|turn)[|｜]?>|<start_of_turn>)\s*"
_CLOSE = r"(?:<[|｜](?:end_header_id|header_end|end_of_role|im_middle|im_sep)[|｜]>)?"
_ENDS = (
    r"<[|｜](?:im_end|eot_id|eot|eom_id|end_of_text|endoftext|END_OF_TURN_TOKEN|end▁of▁sentence)[|｜]>"
    r"|<end_of_turn>|</s>"
)
# What begins and ends turns in the chat templates of the models.
_HEADER = re.compile(
    rf"(?P<assistant>[<\[][|｜](?:im_)?(?:{_ASSISTANTS})(?:_TOKEN)?[|｜][>\]](?:assistant)?{_CLOSE}"
    rf"|{_OPEN}(?:{_ASSISTANTS})\b{_CLOSE}|\[/INST\])"
    rf"|[<\[][|｜](?:im_)?(?:{_OTHERS})(?:_TOKEN)?[|｜][>\]]|{_OPEN}(?:{_OTHERS})\b|\[INST\]|{_ENDS}",
    re.IGNORECASE,
)
_PLAIN_HEADER = re.compile(r"^(?:(?P<assistant>assistant)|user|human|system|tool):[ \t]?", re.IGNORECASE | re.MULTILINE)


def last_turn(prompt: str) -> str | None:
    """Return the text of the assistant's turn that a prompt ends in; "" if it ends in another turn, None if there are
    no turns."""
    for pattern in (_HEADER, _PLAIN_HEADER):
        headers = list(pattern.finditer(prompt))
        if headers:
            return prompt[headers[-1].end() :] if headers[-1]["assistant"] else ""
    return None


def starts_in_reasoning(prompt: str, name: str, last: LastMessage | None = None) -> bool | None:
    """Return whether a completion begins inside reasoning (True) or after it (False); None if the prompt does not say.

    The whole turn of the assistant that the prompt ends in says so; markers in other turns mean nothing.

    Args:
      prompt: As rendered by the chat template.
      name: The reasoning format.
      last: The last message of the conversation, if the prompt is one.

    Raises:
      ConfigError: The format is unknown.
    """
    reasoning = reasoning_parser(name)
    text = "" if last is None else last.text.strip()
    if last is not None and last.is_continued and text:
        return reasoning.ends_inside(_continued_turn(prompt, reasoning, text))
    turn = last_turn(prompt)
    if turn is not None:
        return reasoning.ends_inside(turn)
    is_users = bool(text) and prompt.rstrip().endswith(text) and prompt.count(text) == 1
    return None if is_users else _opened_by_ending(prompt, reasoning)


def ends_in_line(prompt: str, name: str) -> bool:
    """Return whether a prompt that ends inside reasoning ends within a line of it."""
    line = prompt.rpartition("\n")[2].rstrip()
    return bool(line) and not line.endswith(reasoning_parser(name).start_text)


def _continued_turn(prompt: str, reasoning: type[ReasoningFormat], text: str) -> str:
    """Return the assistant's turn that ends with the text of a message; the template may have begun it otherwise."""
    if not prompt.rstrip().endswith(text):
        return last_turn(prompt) or text
    before = prompt.rstrip().removesuffix(text)
    turn = last_turn(before)
    if turn is None:
        is_opened = _opened_by_ending(before, reasoning)
        closed = reasoning.start_text + "".join(reasoning.content_start())
        turn = "" if is_opened is None else reasoning.start_text if is_opened else closed
    return turn + text


def _opened_by_ending(prompt: str, reasoning: type[ReasoningFormat]) -> bool | None:
    prompt = prompt.rstrip()
    if prompt.endswith(reasoning.start_text):
        return True
    return False if prompt.endswith("".join(reasoning.content_start())) else None
