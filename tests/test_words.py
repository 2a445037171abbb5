"""Rejects unclear words in docstrings, comments, messages and Markdown, and names the term to use instead."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("jaxserve", "pallas_kernels", "sharding", "checkpoints", "scripts")
COMMENT = {".c": r"//.*", ".h": r"//.*", ".proto": r"//.*", ".sh": r"#.*"}

_COUNTED = "(tokens?|requests?|steps?|chunks?|bytes|seconds|rows?|pages?|entry|entries|one)"
_UNIT = "second|step|token|row|layer|device|head|request|page|line|call|launch|prompt"
WORDS = {
    r"likeliest": "most likely, argmax",
    r"(is|are|was|were) (no|not) numbers?": "NaN, non-finite",
    r"normed": "normalized",
    r"whole numbers?": "integer",
    r"what is new|news": "delta, new tokens, update",
    r"surfaces?": "API, endpoint",
    r"front doors?": "API",
    r"(matrix|fast|float32|bfloat16) products?|products? (of|with) (the )?(weights|matrices|ones|rows)": "matmul",
    r"(?<!fall )(?<!falls )behind(?! (a|an|the) ((reverse )?proxy|load balancer))": "after, following",
    r"in front of (them|the (head|layers|branch|tokens))": "before",
    r"(put|puts) (them |it )?together": "combine, assemble, batch",
    r"tak(e|es|en|ing) (them |it |a \w+ )?apart": "split, parse",
    r"(given|gives?|giving) (them |it )?back": "return, release, restore",
    r"nothing is said of": "are undefined",
    r"next to nothing": "very little",
    r"nobody|whoever": "name the thread, caller or client",
    r"who (asks?|leaves?|reads?|waits?|calls?|comes?|came)": "the client, the caller",
    r"those (that )?there are|what there is": "in-flight requests, the existing ones",
    r"(time|times) (is|was|are|were) up|has no more time": "time out, deadline exceeded",
    r"what (came|comes|became|becomes) of": "the result, the outcome",
    r"as it should be|what it should be": "valid, correct",
    r"so many|so much of": "this many, a number",
    r"there is no (question|such question)": "unknown method",
    rf"{_COUNTED} a ({_UNIT})(?! (takes|needs|has|sees|can|gets))": "per",
    r"(is|are|was|were|has) gone|(goes|went|going) away": "is closed, has exited, disconnects",
}
PATTERNS = [(re.compile(rf"\b({word})\b", re.IGNORECASE), term) for word, term in WORDS.items()]


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment, and of every string with a space: docstrings, messages, help."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of a file's prose: Python, Markdown, and comments of C, shell and proto files."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from python_prose(source)
    elif path.suffix == ".md":
        for match in re.finditer(r"([^\n]+\n?)+", source):
            yield source.count("\n", 0, match.start()) + 1, match.group()
    elif path.suffix in COMMENT:
        for number, line in enumerate(source.splitlines(), 1):
            yield from ((number, found.group()) for found in re.finditer(COMMENT[path.suffix], line))


def unclear_words(text: str) -> list[str]:
    """Return ``'word' -> term`` for every unclear word of a text; phrases may continue on the next line."""
    joined = re.sub(r"\s*\n[\s#/]*", " ", text)
    return [f"{match.group()!r} -> {term}" for pattern, term in PATTERNS for match in pattern.finditer(joined)]


def files() -> list[Path]:
    """Return the files of the project with prose, without generated ones."""
    inside = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*")]
    suffixes = {".py", ".md", *COMMENT}
    return sorted(
        path
        for path in [*REPOSITORY.glob("*.md"), *inside]
        if path.suffix in suffixes and "_pb2" not in path.name and path.is_file()
    )


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ('"""The token\n    behind the prompt."""', "after"),
        ("The likeliest token.", "argmax"),
        ("Tokens a second, and requests a step.", "per"),
        ("Rows are normed and\n# turned.", "normalized"),
        ("the model's scores are not numbers", "NaN"),
    ],
)
def test_unclear_words_are_found(text: str, term: str) -> None:
    assert any(term in found for found in unclear_words(text))


@pytest.mark.parametrize(
    "text",
    [
        "A server behind a proxy.",
        "A reader that falls behind.",
        "The steps a request takes.",
        "4096 tokens are newsworthy.",
    ],
)
def test_clear_words_pass(text: str) -> None:
    assert not unclear_words(text)


def test_comments_strings_and_pages_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""A docstring."""\nx = 1  # a comment\nraise ValueError(f"a message {x}")\n')
    assert {text for _, text in prose(tmp_path / "a.py")} == {"A docstring.", "# a comment", "a message "}
    (tmp_path / "a.c").write_text("int x; // a comment\n")
    assert [text for _, text in prose(tmp_path / "a.c")] == ["// a comment"]
    (tmp_path / "a.md").write_text("# Title\n\nA\nparagraph\n")
    assert [line for line, _ in prose(tmp_path / "a.md")] == [1, 3]


def test_words() -> None:
    """Fails with one line per unclear word: ``path:line: 'word' -> term``."""
    breaches = [
        f"{path.relative_to(REPOSITORY)}:{line}: {breach}"
        for path in files()
        for line, text in prose(path)
        for breach in unclear_words(text)
    ]
    assert not breaches, "\n" + "\n".join(breaches)
