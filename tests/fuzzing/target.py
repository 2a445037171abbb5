"""What every fuzz target has: a function that takes bytes, bytes to begin with, and words that its format knows."""

import base64
import copy
import importlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_CORPORA = Path(__file__).resolve().parent / "corpora"


class Target(NamedTuple):
    """A place of the product that reads bytes it cannot trust."""

    run: Callable[[bytes], None]
    """Read the bytes; anything that it raises is a finding."""
    seeds: Sequence[bytes]
    """Valid inputs, from which others are made."""
    words: Sequence[bytes]
    """Pieces that mutations insert."""
    packages: Sequence[str]
    """Modules whose branches guide a fuzzer that sees coverage; with the modules below them."""
    is_json: bool = False
    """Mutations change values of a JSON text, after its first byte, as often as bytes."""


def load(name: str) -> Target:
    """Return the target of the module ``tests.fuzzing.targets.NAME``."""
    return importlib.import_module(f"tests.fuzzing.targets.{name}").TARGET


def corpus(name: str) -> list[bytes]:
    """Return the committed inputs of a target: those that once failed, and some that reach many branches."""
    file = corpus_file(name)
    return [base64.b64decode(line) for line in file.read_text().splitlines()] if file.exists() else []


def corpus_file(name: str) -> Path:
    """Return the file with a target's committed inputs, one a line in Base64."""
    return _CORPORA / f"{name}.txt"


def add_to_corpus(name: str, inputs: Sequence[bytes]) -> None:
    """Commit inputs of a target; those that are there already are not added again."""
    lines = {base64.b64encode(data).decode() for data in (*corpus(name), *inputs)}
    corpus_file(name).write_text("".join(f"{line}\n" for line in sorted(lines)))


def mutated(target: Target, data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """Return a changed input.

    Args:
        target: For its words and form.
        data: What is changed.
        rng: Makes every choice.
        other: Another input, of which a piece may be taken.
    """
    for _ in range(rng.choice((1, 1, 2, 4))):
        if target.is_json and rng.random() < 0.7:
            data = _changed_json(data, rng)
        else:
            data = _changed_bytes(data, rng, target.words, other)
    return data


def _changed_bytes(data: bytes, rng: random.Random, words: Sequence[bytes], other: bytes) -> bytes:
    at = rng.randint(0, len(data))
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 30)))
    match rng.randrange(7):
        case 0:
            return data[:at] + rng.randbytes(end - at) + data[end:]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at] + data[at:end] * rng.randint(2, 9) + data[end:]
        case 3:
            return data[:at] + rng.choice([*words, b"\0"]) + data[rng.choice((at, end)) :]
        case 4:
            number = rng.choice((0, 1, -1, 1 << 31, (1 << 63) - 1, rng.getrandbits(16)))
            size = rng.choice((1, 2, 4, 8))
            return data[:at] + (number % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
        case 5:
            begin = rng.randint(0, len(other))
            return data[:at] + other[begin : begin + rng.randint(0, 60)] + data[end:]
        case _:
            return data[:at]


_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -2.5, 1e308, 1 << 31, 1 << 63, 1 << 70, -(1 << 63)),
    *("", "a", "auto", "none", "\ud800", "\0", "a" * 300, [], {}, [[]], [{}], [1, 2, 3], ["a"], {"a": 1}, {"": None}),
)
_DEEP = 500


def _changed_json(data: bytes, rng: random.Random) -> bytes:
    """Return an input of one byte and JSON in which one value is another; others come back as they are."""
    try:
        value = json.loads(data[1:])
    except (ValueError, RecursionError):
        return data
    places = list(_places(value))
    if not places:
        return data
    container, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = [container[key]]
        case 2:
            where, taken = rng.choice(places)
            container[key] = copy.deepcopy(where[taken]) if _size(where[taken]) < _DEEP else None
        case 3 if isinstance(container, dict):
            container[rng.choice(("", "x", "type", "stream"))] = rng.choice(_VALUES)
        case _:
            container[key] = rng.choice(_VALUES)
    return data[:1] + json.dumps(value).encode()


def _places(value: Any) -> "list[tuple[Any, Any]]":
    """Return all containers in a JSON value, each with each of its keys or indices."""
    found, waiting = list[tuple[Any, Any]](), [value]
    while waiting:
        container = waiting.pop()
        if isinstance(container, dict | list):
            keys = list(container) if isinstance(container, dict) else range(len(container))
            found += [(container, key) for key in keys]
            waiting += [container[key] for key in keys]
    return found


def _size(value: Any) -> int:
    return len(_places(value))
