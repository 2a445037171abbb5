"""The training text of the demo model: its vocabulary, and examples packed into rows.

A token is one ASCII character; other characters are their UTF-8 bytes. There are no merges, so that digits and letters
are always separate tokens.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.demo import tasks

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|reserved_0|>", "<|reserved_1|>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
PIECES: tuple[str, ...] = (*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS)
"""The vocabulary in order of token id."""

TOKEN_IDS: dict[str, int] = {piece: index for index, piece in enumerate(PIECES)}
"""Token id of each piece."""

ROW_TOKENS = 96
"""Tokens per packed row; every single turn is shorter."""


class Example:
    """Token ids of one training text, and which of them are answers (the loss is on those)."""

    def __init__(self) -> None:
        """Start with the beginning-of-sequence token."""
        self.token_ids = [TOKEN_IDS["<s>"]]
        self.is_answer = [False]

    def add(self, pieces: Iterable[str], is_answer: bool) -> None:
        """Append special tokens and characters."""
        added = [TOKEN_IDS[piece] for piece in pieces]
        self.token_ids += added
        self.is_answer += [is_answer] * len(added)


def chat_example(*items: tasks.Item) -> Example:
    """Return a chat with one turn for each item, as the chat template writes it."""
    example = Example()
    for item in items:
        example.add(["<|user|>", *item.question, "<|assistant|>"], is_answer=False)
        example.add([*item.answer, "</s>"], is_answer=True)
    return example


def completion_example(item: tasks.Item) -> Example:
    """Return the item in completion form."""
    example = Example()
    example.add(tasks.completion_prompt(item), is_answer=False)
    example.add([*tasks.completion_answer(item), "</s>"], is_answer=True)
    return example


@dataclass(frozen=True)
class TextMix:
    """Composition of a stream of examples."""

    task_weights: tuple[float, ...]
    """Relative frequency of each of `TASKS`."""
    single_chats: float
    """Fraction of chats of one turn."""
    double_chats: float
    """Fraction of chats of two turns; the rest are completions."""


def training_examples(mix: TextMix, seed: int) -> Iterator[Example]:
    """Yield examples forever, generated from a seed."""
    items = tasks.training_items(seed, dict(zip(tasks.TASKS, mix.task_weights, strict=True)))
    source = random.Random(f"forms {seed}")
    while True:
        draw = source.random()
        if draw < mix.single_chats:
            yield chat_example(next(items))
        elif draw < mix.single_chats + mix.double_chats:
            pair = next(items), next(items)
            chat = chat_example(*pair)
            yield from [chat] if len(chat.token_ids) <= ROW_TOKENS else map(chat_example, pair)
        else:
            yield completion_example(next(items))


class Batch:
    """Several examples per row: token ids, the index of each token's example (0 is padding), the loss mask; [rows,
    tokens]."""

    def __init__(self, num_rows: int) -> None:
        """Start with rows of padding."""
        self.token_ids = np.full((num_rows, ROW_TOKENS), TOKEN_IDS["<pad>"], np.int32)
        self.segments = np.zeros((num_rows, ROW_TOKENS), np.int32)
        self.is_answer = np.zeros((num_rows, ROW_TOKENS), bool)

    def put(self, row: int, start: int, example: Example, segment: int) -> None:
        """Write an example into a row."""
        span = slice(start, start + len(example.token_ids))
        self.token_ids[row, span] = example.token_ids
        self.segments[row, span] = segment
        self.is_answer[row, span] = example.is_answer

    def num_wrong(self, predicted: np.ndarray) -> int:
        """Return how many examples have a wrong answer token, given the token predicted after each [rows, tokens]."""
        is_wrong = self.is_answer[:, 1:] & (predicted[:, :-1] != self.token_ids[:, 1:])
        return len(np.unique(self.segments[:, 1:][is_wrong]))


def packed_batches(examples: Iterable[Example], num_rows: int) -> Iterator[Batch]:
    """Yield batches of examples in order, each example in the first row with room; the last batch is padded."""
    batch, used, segment = Batch(num_rows), [0] * num_rows, 0
    for example in examples:
        size = len(example.token_ids)
        row = next((row for row in range(num_rows) if used[row] + size <= ROW_TOKENS), num_rows)
        if row == num_rows:
            yield batch
            batch, used, segment, row = Batch(num_rows), [0] * num_rows, 0, 0
        segment += 1
        batch.put(row, used[row], example, segment)
        used[row] += size
    yield batch
