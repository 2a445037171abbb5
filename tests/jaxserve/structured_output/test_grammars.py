"""Structured outputs: random walks over the allowed tokens must spell texts that independent validators accept."""

import functools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.api.errors import EngineDeadError, RequestError
from jaxserve.api.structured_params import StructuredOutputsParams
from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.scheduling.sequence import Constraint
from jaxserve.structured_output.grammar_constraint import Grammar
from jaxserve.structured_output.grammar_source import GrammarLimits
from jaxserve.structured_output.grammars import GrammarCompiler
from jaxserve.text.token_pieces import TextJoiner
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer

EXTRA_IDS = 70
"""Ids of the model without a token."""
NUM_SEEDS = 200

RealTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    """The demo model's tokenizer."""
    return load_tokenizer(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def make_compiler() -> Iterator[Callable[..., GrammarCompiler]]:
    """Makes compilers, each once for the same arguments, and closes them."""
    made: dict[Any, GrammarCompiler] = {}

    def make(tokenizer: Tokenizer, end_ids: tuple[int, ...] | None = None) -> GrammarCompiler:
        if end_ids is None:
            end_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        if (tokenizer, end_ids) not in made:
            made[tokenizer, end_ids] = GrammarCompiler(tokenizer, size_of(tokenizer), end_ids, num_threads=1)
        return made[tokenizer, end_ids]

    yield make
    for compiler in made.values():
        compiler.close()


@pytest.fixture
def compiler(make_compiler: Callable[..., GrammarCompiler], demo: Tokenizer) -> GrammarCompiler:
    """For the demo model."""
    return make_compiler(demo)


def size_of(tokenizer: Tokenizer) -> int:
    """Ids of a model with this tokenizer and some ids to spare."""
    return max(tokenizer.vocab_size, *tokenizer.all_special_ids, 0) + EXTRA_IDS


def compiled(compiler: GrammarCompiler, **fields: Any) -> Grammar:
    """The grammar of some parameters."""
    return compiler.submit(StructuredOutputsParams(**fields)).result()


def ids_of(mask: bytes) -> list[int]:
    """Ids whose bit is set."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of ids that continue a prompt, special tokens left out."""
    joiner = TextJoiner(tokenizer.pieces(skip_special_tokens=True), tokenizer.encode("a", add_special_tokens=False))
    return "".join(joiner.feed(token) for token in ids) + joiner.finish()


@functools.cache
def ids_with(tokenizer: Tokenizer, marks: str) -> np.ndarray:
    """Which tokens have one of some characters, by id."""
    pieces = tokenizer.pieces(skip_special_tokens=False)
    texts = [pieces[token] or "" for token in range(size_of(tokenizer))]
    return np.array([any(mark in text for mark in marks) for text in texts])


def walk(constraint: Constraint, tokenizer: Tokenizer, seed: int, closers: str = '"}],') -> str:
    """The text of a random walk to the end; it hurries towards the end more and more."""
    generator = random.Random(seed)
    end_id = tokenizer.eos_token_id
    closing = ids_with(tokenizer, closers)
    ids: list[int] = []
    for _ in range(4000):
        mask = constraint.mask()
        assert mask is not None
        choices = np.array(ids_of(mask))
        hurried = choices[closing[choices]]
        if end_id is not None and end_id in choices and generator.random() < 0.3:
            token = end_id
        elif len(hurried) and generator.random() < 0.2 + len(ids) / 100:
            token = int(generator.choice(hurried))
        else:
            token = int(generator.choice(choices))
        if constraint.accept(token):
            return text_of(tokenizer, ids)
        ids.append(token)
    raise AssertionError(f"no end: {text_of(tokenizer, ids)[:300]!r}")


def takes(grammar: Grammar, tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether a text of these ids may end there. Masks may ask for longer tokens where the grammar leaves no choice."""
    constraint = grammar.constraint()
    try:
        if any([constraint.accept(token) for token in ids]):
            return True
    except RuntimeError:
        return False
    return tokenizer.eos_token_id in ids_of(constraint.mask())


def spelt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in the middle of another, one token a character."""
    by_text = {tokenizer.token_text(token): token for token in range(tokenizer.vocab_size)}
    return [by_text[character] for character in text]


# ---------------------------------------------------------------- JSON schemas


def random_schema(generator: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the kinds that people ask for, with some text that matches it."""
    kinds = ["string", "length", "pattern", "integer", "bounded", "number", "boolean", "enum", "const", "null"]
    kind = generator.choice(kinds + ["object", "array", "anyOf"] * 3 if depth < 3 else kinds)
    low = generator.randint(-200, 200)
    if kind == "object" or depth == 0:
        names = generator.sample(["name", "age", "é ü", "x-1", "a b", "tags", "😀"], generator.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: random_schema(generator, depth + 1) for name in names},
            "required": [name for name in names if generator.random() < 0.6],
        }
        extra = generator.choice([None, False, False, {"type": "integer"}])
        return schema if extra is None else {**schema, "additionalProperties": extra}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "string": lambda: {"type": "string"},
        "length": lambda: {"type": "string", "minLength": abs(low) % 4, "maxLength": abs(low) % 4 + 5},
        "pattern": lambda: {"type": "string", "pattern": generator.choice(["^[A-Z]{2,4}-\\d+$", "^(ab|c)*$", "^é+$"])},
        "integer": lambda: {"type": "integer"},
        "bounded": lambda: {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 300)},
        "number": lambda: {"type": "number", "exclusiveMinimum": low, "maximum": low + 10.5},
        "boolean": lambda: {"type": "boolean"},
        "enum": lambda: {"enum": generator.sample(["red", 'qu"ote', "ö\n", 7, None, True, -1.5, [1, "x"]], 3)},
        "const": lambda: {"const": generator.choice(["fixed", 12, {"a": [1]}])},
        "null": lambda: {"type": "null"},
        "anyOf": lambda: {"anyOf": [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]},
        "array": lambda: {
            "type": "array",
            "items": random_schema(generator, depth + 1),
            "minItems": abs(low) % 3,
            "maxItems": abs(low) % 3 + 2,
        },
    }
    return made[kind]()


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 20))
def test_texts_of_random_schemas_validate(compiler: GrammarCompiler, demo: Tokenizer, first: int) -> None:
    """The validator is the jsonschema package."""
    for seed in range(first, first + 20):
        schema = random_schema(random.Random(seed))
        grammar = compiled(compiler, json=schema if seed % 2 else json.dumps(schema))
        text = walk(grammar.constraint(), demo, seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("options", [{"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]?"}, {}])
def test_white_space_options(compiler: GrammarCompiler, demo: Tokenizer, options: dict[str, Any]) -> None:
    """None, at most one blank, or any of a few characters."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = compiled(compiler, json=schema, **options)
    texts = ['{"a":1}', '{"a": 1}', '{"a":  1}', '{"a":\n1}']
    expected = {"disable_any_whitespace": 1, "whitespace_pattern": 2}.get("".join(options), 4)
    assert [takes(grammar, demo, spelt(demo, text)) for text in texts] == [True] * expected + [False] * (4 - expected)


def test_white_space_is_bounded_by_default(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Unless the request or its schema says otherwise."""
    schema: dict[str, Any] = {"type": "object"}

    def most(**fields: Any) -> int:
        """How much of 100 characters of white space a grammar takes in one place."""
        constraint = compiled(compiler, **fields).constraint()
        constraint.accept(spelt(demo, "{")[0])
        for count, token in enumerate(spelt(demo, "\n" + " " * 99)):
            if token not in ids_of(constraint.mask()):
                return count
            constraint.accept(token)
        return 100

    assert [most(json=schema), most(json_object=True)] == [32, 32]
    assert most(json=schema, whitespace_pattern=r"\s*") == 100
    assert most(json_object=True, whitespace_pattern="[\n ]{1,3}") == 3
    assert most(json_object=True, disable_any_whitespace=True) == 0
    assert most(json={**schema, "x-guidance": {"whitespace_flexible": True}}) == 100
    assert most(json={**schema, "x-guidance": {"whitespace_flexible": False}}) == 0


def test_additional_properties_may_be_disabled(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """At every depth, but not where the schema allows them itself."""
    inner = {"type": "object", "properties": {"properties": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": {"anyOf": [inner]}, "b": {**inner, "additionalProperties": True}}}
    more = {"": '{"c":1}', "a": '{"a":{"c":1}}', "b": '{"b":{"c":1}}', "named": '{"a":{"properties":1}}'}
    for closed, expected in ((False, "ab"), (True, "b")):
        grammar = compiled(compiler, json=schema, disable_additional_properties=closed)
        taken = {name for name, text in more.items() if takes(grammar, demo, spelt(demo, text))}
        assert taken == ({*expected, "named"} if closed else set(more))


def test_json_object(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Any object, and nothing else."""
    grammar = compiled(compiler, json_object=True)
    for seed in range(20):
        assert isinstance(json.loads(walk(grammar.constraint(), demo, seed)), dict)


# ---------------------------------------------------------------- regular expressions and choices


def random_pattern(generator: random.Random, depth: int = 0) -> str:
    """A pattern in the notation that Python and llguidance share; repeated such that a random text comes to an end."""
    atoms = ["a", "b", "xyz", "[a-f]", "é", "😀", "\\.", "[0-9A-F]", " ", "/", '"', "\\n", "[x-zß-ü]", "\\x41", "\\\\"]
    some, any_number = ["", "", "", "?", "{2}", "{1,3}", "{0,2}"], ["*", "+", "{2,}"]
    parts: list[str] = []
    for _ in range(generator.randint(1, 4)):
        if depth < 3 and generator.random() < 0.35:
            inner = "|".join(random_pattern(generator, depth + 1) for _ in range(generator.randint(1, 3)))
            is_narrow = "." not in inner and "[" not in inner
            atom, repeat = f"({inner})", generator.choice(some + any_number if is_narrow else some)
        elif generator.random() < 0.2:
            atom, repeat = generator.choice([".", "[^a-y ]"]), generator.choice(some)
        else:
            atom, repeat = generator.choice(atoms), generator.choice(some + any_number)
        parts.append(f"(?:{atom}){repeat}" if repeat else atom)
    return "".join(parts)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 20))
def test_texts_of_random_patterns_match(compiler: GrammarCompiler, demo: Tokenizer, first: int) -> None:
    """The validator is Python's own `re`."""
    for seed in range(first, first + 20):
        pattern = random_pattern(random.Random(seed))
        text = walk(compiled(compiler, regex=pattern).constraint(), demo, seed, closers="")
        assert re.fullmatch(pattern, text), (pattern, text)


def test_anchors_around_a_pattern(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Users write them; the whole text matches anyway."""
    assert takes(compiled(compiler, regex="^ab$"), demo, spelt(demo, "ab"))
    assert not takes(compiled(compiler, regex="^ab$"), demo, spelt(demo, "abb"))


CHOICES = ["yes", "no", "yes!", 'a "b"', "é😀", "new\nline\\n", "\x01\x7f", "a/b"]


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_choices_are_what_comes_out(
    make_compiler: Callable[..., GrammarCompiler], tiny_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    """All of them come up, and nothing else."""
    tokenizer = tiny_tokenizers[name]
    end_id = tokenizer.token_to_id("<|end|>") if name == "byte-level" else tokenizer.eos_token_id
    assert end_id is not None
    grammar = compiled(make_compiler(tokenizer, (end_id,)), choice=CHOICES)
    found: set[str] = set()
    for seed in range(150):
        generator, constraint, ids = random.Random(seed), grammar.constraint(), list[int]()
        while not ids or not constraint.accept(ids[-1]):
            ids.append(generator.choice(ids_of(constraint.mask())))
        found.add(text_of(tokenizer, ids))
    assert found == set(CHOICES)


# ---------------------------------------------------------------- grammars and tags

EBNF = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"\n'
LARK = 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/\n'


@pytest.mark.parametrize("grammar", [EBNF, LARK, "%llguidance {}\n" + LARK])
def test_both_notations_of_grammars(compiler: GrammarCompiler, demo: Tokenizer, grammar: str) -> None:
    """Sums with parentheses: no regular language. Python's parser knows them too."""
    made = compiled(compiler, grammar=grammar)
    for seed in range(30):
        text = walk(made.constraint(), demo, seed, closers="0123456789)")
        assert re.fullmatch("[0-9+()]+", text)
        compile(re.sub("[0-9]+", "1", text), "", "eval")


def tag(begin: str, end: str, schema: Any) -> dict[str, Any]:
    """One structure."""
    return {"begin": begin, "end": end, "schema": schema}


def test_structural_tags(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Free text, but a trigger leads into a tag whose middle keeps to its schema."""
    number, flag = {"type": "integer"}, {"type": "boolean"}
    described = {"structures": [tag("<f=a>", "</f>", number), tag("<f=b>", "</f>", flag)], "triggers": ["<f="]}
    grammar = compiled(compiler, structural_tag=json.dumps(described), disable_any_whitespace=True)
    good = ["", "hi", "<f=a>12</f>", "x<f=b>true</f>y<f=a>3</f>", "a<b", "<f"]
    bad = ["<f=c>", "<f=a>true</f>", "<f=b>true", "<f=a>1</f><f="]
    assert [text for text in good + bad if takes(grammar, demo, spelt(demo, text))] == good


def test_structural_tags_have_formats(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """The present form, with a grammar that is converted in the child process; test_structural_tag.py has the types."""
    content = {"type": "grammar", "grammar": 'root ::= "a" | "b"'}
    form = {
        "type": "sequence",
        "elements": [{"type": "any_text"}, {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}],
    }
    grammar = compiled(compiler, structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    good, bad = ["<f>a</f>", "text <f>b</f>"], ["text", "<f>c</f>", "<f>a</f>x"]
    assert [text for text in good + bad if takes(grammar, demo, spelt(demo, text))] == good
    with pytest.raises(RequestError, match="structural_tag cannot be compiled"):
        compiled(
            compiler,
            structural_tag=json.dumps({"type": "structural_tag", "format": {**content, "grammar": "root ::= ("}}),
        )


def test_a_trigger_may_be_a_special_token(
    make_compiler: Callable[..., GrammarCompiler], tiny_tokenizers: dict[str, Tokenizer]
) -> None:
    """Then the token itself leads into the tag, and its name in plain text does not."""
    tokenizer = tiny_tokenizers["byte-fallback"]
    special = tokenizer.token_to_id("<|assistant|>")
    assert special is not None and tokenizer.eos_token_id is not None
    described = {"structures": [tag("<|assistant|>", "", {"type": "integer"})], "triggers": ["<|assistant|>"]}
    grammar = compiled(make_compiler(tokenizer), structural_tag=json.dumps(described))
    digit = tokenizer.token_to_id("<0x31>")
    letter = tokenizer.token_to_id("a")
    assert digit is not None and letter is not None
    assert takes(grammar, tokenizer, [letter, special, digit])
    assert not takes(grammar, tokenizer, [special])
    assert not takes(grammar, tokenizer, [special, letter])
    assert takes(grammar, tokenizer, spelt(tokenizer, "<|a"))


# ---------------------------------------------------------------- ends, samples, vocabularies


@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_end_token_ends(make_compiler: Callable[..., GrammarCompiler], demo: Tokenizer, which: int) -> None:
    """One without a text, and one above the tokenizer's, too; all of them alone where the grammar must stop."""
    assert demo.eos_token_id is not None
    end_ids = (demo.eos_token_id, demo.vocab_size + 3, size_of(demo) - 1)
    grammar = compiled(make_compiler(demo, end_ids), regex="ab?")
    (a,), (b,) = spelt(demo, "a"), spelt(demo, "b")
    constraint = grammar.constraint()
    assert not set(end_ids) & set(ids_of(constraint.mask()))
    assert not constraint.accept(a)
    assert {b, *end_ids} <= set(ids_of(constraint.mask()))
    early = grammar.constraint()
    assert not early.accept(a)
    assert early.accept(end_ids[which])
    assert not constraint.accept(b)
    assert ids_of(constraint.mask()) == sorted(end_ids)
    assert constraint.accept(end_ids[which])


def test_without_an_end_token_the_last_token_completes(
    make_compiler: Callable[..., GrammarCompiler], demo: Tokenizer
) -> None:
    """Where more could come, it goes on."""
    compiler = make_compiler(demo, ())
    constraint = compiled(compiler, regex="ab?c{2}").constraint()
    assert [constraint.accept(token) for token in spelt(demo, "abcc")] == [False, False, False, True]
    going_on = compiled(compiler, regex="a+").constraint()
    for token in spelt(demo, "aaaa"):
        assert token in ids_of(going_on.mask())
        assert not going_on.accept(token)
    with pytest.raises(RequestError, match="matches only the empty string, and the model has no end-of-sequence token"):
        compiled(compiler, regex="")


def test_ids_without_a_token_are_never_allowed(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Nor special tokens, nor any id by way of the bits that fill the last word up."""
    constraint = compiled(compiler, regex="(.|\\n)*").constraint()
    mask = constraint.mask()
    assert len(mask) == 4 * ((size_of(demo) + 31) // 32)
    found = set(ids_of(mask))
    assert max(found) < demo.vocab_size
    assert found & demo.all_special_ids == {demo.eos_token_id}
    assert len(found) > demo.vocab_size // 2


def test_samples_of_a_request_are_independent(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """Each has its own place in the grammar they share."""
    grammar = compiled(compiler, regex="a{3}|b{3}")
    (a,), (b,) = spelt(demo, "a"), spelt(demo, "b")
    first, second = grammar.constraint(), grammar.constraint()
    first.accept(a)
    second.accept(b)
    assert (a in ids_of(first.mask()), b in ids_of(first.mask())) == (True, False)
    assert (a in ids_of(second.mask()), b in ids_of(second.mask())) == (False, True)
    assert {a, b} <= set(ids_of(grammar.constraint().mask()))


def test_asking_twice_changes_nothing(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """A preempted request's mask is computed again."""
    constraint = compiled(compiler, regex="[ab]{2}").constraint()
    constraint.accept(spelt(demo, "a")[0])
    assert constraint.mask() == constraint.mask()
    constraint.accept(spelt(demo, "b")[0])
    assert ids_of(constraint.mask()) == [demo.eos_token_id]


def test_a_token_that_does_not_fit_is_an_error(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """It can only come from a fault elsewhere; the constraint is of no more use."""
    constraint = compiled(compiler, regex="a").constraint()
    (b,) = spelt(demo, "b")
    with pytest.raises(RuntimeError, match=f"token {b} is not allowed by the structured output"):
        constraint.accept(b)
    with pytest.raises(RuntimeError, match="cannot continue"):
        constraint.mask()


def test_a_text_that_the_vocabulary_cannot_spell(
    make_compiler: Callable[..., GrammarCompiler], tiny_tokenizers: dict[str, Tokenizer]
) -> None:
    """Known at once, or where the text gets there."""
    tokenizer = tiny_tokenizers["words"]
    compiler = make_compiler(tokenizer, (4,))
    with pytest.raises(RequestError, match="no text matches it"):
        compiled(compiler, regex="xyz")
    constraint = compiled(compiler, regex="( hello)+").constraint()
    assert ids_of(constraint.mask()) == [tokenizer.token_to_id("hello")]
    assert not constraint.accept(1)
    assert ids_of(constraint.mask()) == [1, 3, 4]
    assert not constraint.accept(3)
    with pytest.raises(RuntimeError, match="structured output"):
        constraint.accept(ids_of(constraint.mask())[0])


REAL_NAMES = ["qwen", "deepseek-r1", "llama2", "llama2-model-only", "mistral-v1", "mistral-v7", "phi3", "gpt2"]
TEXTS = ['{"key": "Grüße, 世界 😀", "n": [1, 2.5]}', "    indented\n\tline", "naïve café", "\u00a0 odd\u2003spaces"]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_real_tokenizers(
    make_compiler: Callable[..., GrammarCompiler], real_tokenizer: RealTokenizer, name: str
) -> None:
    """A choice of hard texts comes out as written; a JSON walk validates."""
    tokenizer = real_tokenizer(name)
    compiler = make_compiler(tokenizer)
    grammar = compiled(compiler, choice=TEXTS)
    found = {walk(grammar.constraint(), tokenizer, seed) for seed in range(8)}
    assert found <= set(TEXTS) and len(found) > 1
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a"]}
    grammar = compiled(compiler, json=schema)
    for seed in range(2):
        jsonschema.validate(json.loads(walk(grammar.constraint(), tokenizer, seed)), schema)


@pytest.mark.parametrize("name", REAL_NAMES)
def test_forced_text_uses_the_tokens_a_prompt_would(
    make_compiler: Callable[..., GrammarCompiler], real_tokenizer: RealTokenizer, name: str
) -> None:
    """Where the grammar leaves no choice, the model sees the tokens it knows the text by, in one mask each."""
    tokenizer = real_tokenizer(name)
    text = " information about"
    constraint = compiled(make_compiler(tokenizer), choice=[text]).constraint()
    ids: list[int] = []
    while not ids or not constraint.accept(ids[-1]):
        (token,) = ids_of(constraint.mask())
        ids.append(token)
    before = tokenizer.encode("some", add_special_tokens=False)
    assert [*before, *ids[:-1]] == tokenizer.encode("some" + text, add_special_tokens=False)


# ---------------------------------------------------------------- what is refused

HUGE = {"type": "array", "items": {"enum": [f"value {place}" for place in range(30_000)]}}
TAGS = json.dumps({"structures": [tag("<f>", "", {})], "triggers": ["<g"]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "["}, "regex cannot be compiled: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "look-ahead and look-behind, is not supported"),
        ({"regex": "(a)\\1"}, "backreferences are not supported"),
        ({"regex": "a\\bc"}, "lookarounds not supported"),
        ({"regex": "(" * 300 + ")" * 300}, "regex cannot be compiled: "),
        ({"json": {"type": "bogus"}}, "json cannot be compiled: Invalid type: bogus"),
        ({"json": {"$ref": "https://example.com/schema"}}, "json cannot be compiled: "),
        ({"json": {"not": {}}}, "json cannot be compiled: "),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text matches it"),
        ({"json": "false"}, "must contain JSON schemas that are objects, got False"),
        ({"json": HUGE}, r"json is \d+ bytes long; the limit is 262144"),
        ({"grammar": "hello world"}, "grammar cannot be compiled: Expected ::= at line 1"),
        ({"grammar": 'root ::= "a" | b root\n'}, "Rule 'b' not found"),
        ({"grammar": 'rule ::= "a"\n'}, "No 'root' rule found"),
        ({"grammar": "start: b\n"}, "grammar cannot be compiled: .*unknown name"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
        ({"grammar": "start: start\n"}, "grammar cannot be compiled: "),
        (
            {"choice": ["a"], "disable_any_whitespace": True},
            "choice is not a JSON schema, so disable_any_whitespace does not apply",
        ),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
        ({"json_object": True, "whitespace_pattern": "["}, "json_object cannot be compiled: "),
        ({"structural_tag": '{"format": {}}'}, "must be a JSON object with the lists 'structures'"),
        (
            {"structural_tag": '{"structures": [1], "triggers": ["a"]}'},
            "must have tags with the strings 'begin' and 'end'",
        ),
        ({"structural_tag": '{"structures": [1], "triggers": [2]}'}, "must have strings as triggers"),
        ({"structural_tag": TAGS}, "has a tag with begin='<f>', which starts with none"),
    ],
)
def test_what_is_wrong_is_said(compiler: GrammarCompiler, fields: dict[str, Any], message: str) -> None:
    """As an error of the request that names the parameter."""
    with pytest.raises(RequestError, match=message) as caught:
        compiled(compiler, **fields)
    assert caught.value.parameter == "structured_outputs"
    assert len(str(caught.value)) < 1500


def chained(num_rules: int) -> str:
    """A grammar whose rules each name the next."""
    rules = [f"r{place}: r{place + 1}" for place in range(num_rules)]
    return "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])


def test_a_grammar_that_crashes_the_library_fails_alone(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """60 kB are enough to overflow its stack."""
    with pytest.raises(RequestError, match="it exceeds the memory or stack limit"):
        compiled(compiler, grammar=chained(10_000))
    assert takes(compiled(compiler, regex="after+"), demo, spelt(demo, "after"))


def test_a_pattern_that_is_too_complex_only_for_some_texts(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    """It is the client's error; the next request with the pattern gets a matcher with fresh limits."""
    pattern = {"regex": "((a|b|ab|ba){1,500}(a|ab){1,500}){1,500}"}
    grammar, (a,) = compiled(compiler, **pattern), spelt(demo, "a")
    constraint = grammar.constraint()
    with pytest.raises(
        RequestError, match="^structured_outputs.regex is too complex: lexer error: too many expressions"
    ):
        for _ in range(200):
            constraint.mask()
            constraint.accept(a)
    assert takes(compiled(compiler, **pattern), demo, spelt(demo, "aa"))
    other = compiled(compiler, regex="a{3}")
    assert takes(other, demo, spelt(demo, "aaa")) and compiled(compiler, regex="a{3}") is other


def test_a_grammar_that_never_gets_done_fails_on_time(demo: Tokenizer) -> None:
    """The library would look for multiples of this number for minutes."""
    compiler = GrammarCompiler(demo, 400, [2], limits=GrammarLimits(time_s=0.5), num_threads=1)
    slow = compiler.submit(StructuredOutputsParams(json={"type": "integer", "multipleOf": 62615533}))
    behind = compiler.submit(StructuredOutputsParams(regex="ab"))
    with pytest.raises(RequestError, match="it is too complex: not compiled within 0.5 s"):
        slow.result(60)
    assert takes(behind.result(60), demo, spelt(demo, "ab"))
    compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit memory")
def test_memory_of_compiling_is_limited(demo: Tokenizer) -> None:
    """The process that tries grammars gets no more of it."""
    compiler = GrammarCompiler(demo, 400, [2], limits=GrammarLimits(memory_bytes=1 << 20), num_threads=1)
    with pytest.raises(RequestError, match="it exceeds the memory or stack limit"):
        compiled(compiler, grammar="start: " + " ".join(f'"{place}"{{1,1000}}' for place in range(3000)))
    compiler.close()


# ---------------------------------------------------------------- the cache


def test_equal_contents_share_a_grammar(compiler: GrammarCompiler) -> None:
    """Text or dict, but not with other options; and a failure is not kept."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    first = compiled(compiler, json=schema)
    assert compiled(compiler, json=dict(schema)) is first
    assert compiled(compiler, json=schema, disable_any_whitespace=True) is not first
    assert compiled(compiler, json={**schema, "properties": {"a": {}, "b": {}}}) is not first
    assert compiled(compiler, regex="q") is not compiled(compiler, choice=["q"])
    bad = StructuredOutputsParams(regex="[")
    failed = compiler.submit(bad)
    assert isinstance(failed.exception(), RequestError)
    assert compiler.submit(bad) is not failed


def test_the_cache_is_bounded(demo: Tokenizer) -> None:
    """In number and in bytes, least recently used first."""
    limits = GrammarLimits(max_cached=2, max_cached_bytes=300)
    compiler = GrammarCompiler(demo, 400, [2], limits=limits, num_threads=1)
    a, b = compiled(compiler, regex="a"), compiled(compiler, regex="b")
    assert compiled(compiler, regex="a") is a
    compiled(compiler, regex="c")
    assert compiled(compiler, regex="a") is a
    assert compiled(compiler, regex="b") is not b
    compiled(compiler, regex="x" * 299)
    assert compiled(compiler, regex="a") is not a
    compiler.close()


def test_those_that_wait_are_bounded_and_end_with_the_compiler(demo: Tokenizer) -> None:
    """A slow grammar holds the only thread."""
    compiler = GrammarCompiler(demo, 400, [2], limits=GrammarLimits(time_s=60.0, max_waiting=2), num_threads=1)
    slow = compiler.submit(StructuredOutputsParams(json={"type": "integer", "multipleOf": 62615533}))
    behind = compiler.submit(StructuredOutputsParams(regex="ab"))
    with pytest.raises(RequestError, match="regex is rejected: 2 grammars are waiting to be compiled"):
        compiled(compiler, regex="b")
    compiler.close()
    for future in (slow, behind):
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(60)
    with pytest.raises(RuntimeError, match="shut down"):
        compiled(compiler, regex="c")
