"""The demo model's four tasks: questions, correct answers, the held-out split and the checker.

* ``sum``: two numbers of 1 to 3 digits.
* ``sort``: 3 to 8 numbers from 0 to 99, ascending.
* ``reverse``: a word of 3 to 12 lowercase letters, last letter first.
* ``count``: how many letters a word of 3 to 12 letters has.

One problem (a task with its operands) has several wordings. Whether it is held out depends only on the problem, so a
held-out problem is never trained on in any wording.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

TASKS: tuple[str, ...] = ("sum", "sort", "reverse", "count")
"""Names of the tasks."""

HELD_OUT_MODULUS = 10
"""One problem in this many is never trained on."""

WORDINGS: dict[str, tuple[str, ...]] = {
    "sum": ("What is {} + {}?", "What is {}+{}?", "{} + {}", "Add {} and {}"),
    "sort": ("Sort {}", "Sort: {}", "Order {}", "Put {} in order"),
    "reverse": ("Reverse {}", "Reverse: {}", "Reverse the word {}", "Spell {} backwards"),
    "count": ("Count {}", "Count the letters of {}", "How many letters in {}?", "Length of {}?"),
}
"""The wordings of a question; each ``{}`` is one operand (a number, a list of numbers or a word)."""

SHORT_FORMS: dict[str, str] = {"sum": "{}+{}=", "sort": "sort {}:", "reverse": "reverse {}:", "count": "count {}:"}
"""The short completion prompt of each task."""

_OPERANDS = {"sum": "([0-9]+)", "sort": "([0-9]+(?: [0-9]+)*)", "reverse": "([a-z]+)", "count": "([a-z]+)"}
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (task, re.compile(re.escape(wording).replace(re.escape("{}"), _OPERANDS[task])))
    for task in TASKS
    for wording in WORDINGS[task]
)
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class UnknownQuestionError(ValueError):
    """The question has none of the demo model's wordings."""


@dataclass(frozen=True)
class Problem:
    """A task with its operands: ``("sum", ("12", "7"))``, ``("sort", ("5 3 9",))``, ``("count", ("tree",))``."""

    task: str
    operands: tuple[str, ...]

    def answer(self) -> str:
        """Return the correct answer as text."""
        if self.task == "sum":
            return str(sum(int(operand) for operand in self.operands))
        (operand,) = self.operands
        if self.task == "sort":
            return " ".join(sorted(operand.split(), key=int))
        return operand[::-1] if self.task == "reverse" else str(len(operand))


@dataclass(frozen=True)
class Item:
    """A question as a user would type it, with its correct answer."""

    task: str
    question: str
    answer: str


def problem_of(question: str) -> Problem:
    """Return the problem that a question asks.

    Raises:
        UnknownQuestionError: the question is in none of `WORDINGS`.
    """
    for task, pattern in _PATTERNS:
        if match := pattern.fullmatch(question):
            return Problem(task, match.groups())
    raise UnknownQuestionError(f"expected a question in one of the demo model's wordings, got {question!r}")


def is_held_out(question: str) -> bool:
    """Return whether training never sees this question's problem, in any wording (sha256 of the problem).

    Raises:
        UnknownQuestionError: the question is in none of `WORDINGS`.
    """
    return _is_problem_held_out(problem_of(question))


def held_out(task: str, count: int, seed: int = 0) -> list[Item]:
    """Return `count` held-out items of one task, all of different problems.

    Raises:
        ValueError: the task is unknown.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; tasks: {', '.join(TASKS)}")
    source = random.Random(f"held out {task} {seed}")
    return list(islice(_distinct_held_out(task, source), count))


def training_items(seed: int = 0, weights: dict[str, float] | None = None) -> Iterator[Item]:
    """Yield training items forever, none of them held out.

    Args:
        seed: the same seed gives the same items.
        weights: relative frequency of each task; equal when None.
    """
    source = random.Random(f"training {seed}")
    frequency = dict.fromkeys(TASKS, 1.0) if weights is None else weights
    tasks, relative = list(frequency), list(frequency.values())
    while True:
        problem = _draw_problem(source.choices(tasks, relative)[0], source)
        if not _is_problem_held_out(problem):
            yield _ask(problem, source)


def completion_prompt(item: Item) -> str:
    """Return the item as text to be continued: ``Q: ...\\nA:`` or, for about half of the items, the short form."""
    if _digest(item.question) % 2 == 0:
        return f"Q: {item.question}\nA:"
    return SHORT_FORMS[item.task].format(*problem_of(item.question).operands)


def completion_answer(item: Item) -> str:
    """Return the text after `completion_prompt` up to the end of the sequence: the answer, spaced after a colon."""
    return f" {item.answer}" if completion_prompt(item).endswith(":") else item.answer


def chat_messages(item: Item) -> list[dict[str, str]]:
    """Return the item as the messages of a chat with one user turn."""
    return [{"role": "user", "content": item.question}]


def is_correct(item: Item, text: str) -> bool:
    """Return whether a completion is the item's answer, ignoring surrounding white space."""
    return text.strip() == item.answer


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _is_problem_held_out(problem: Problem) -> bool:
    return _digest(f"{problem.task} {' '.join(problem.operands)}") % HELD_OUT_MODULUS == 0


def _distinct_held_out(task: str, source: random.Random) -> Iterator[Item]:
    seen: set[Problem] = set()
    while True:
        problem = _draw_problem(task, source)
        if problem not in seen and _is_problem_held_out(problem):
            seen.add(problem)
            yield _ask(problem, source)


def _ask(problem: Problem, source: random.Random) -> Item:
    wording = source.choice(WORDINGS[problem.task])
    return Item(problem.task, wording.format(*problem.operands), problem.answer())


def _draw_problem(task: str, source: random.Random) -> Problem:
    if task == "sum":
        return Problem(task, (_draw_number(source), _draw_number(source)))
    if task == "sort":
        return Problem(task, (" ".join(str(source.randrange(100)) for _ in range(source.randint(3, 8))),))
    return Problem(task, (_draw_word(source),))


def _draw_number(source: random.Random) -> str:
    num_digits = source.randint(1, 3)
    return str(source.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits))


def _draw_word(source: random.Random) -> str:
    num_letters = source.randint(3, 12)
    if source.random() < 0.7:
        return "".join(source.choices(_LETTERS, k=num_letters))
    start = source.randrange(2)
    return "".join(source.choice(_VOWELS if (start + i) % 2 else _CONSONANTS) for i in range(num_letters))
