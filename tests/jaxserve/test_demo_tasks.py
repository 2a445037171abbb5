"""The demo tasks: right answers, an honest held-out split, and prompts in the form the demo model was trained on."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from jaxserve.demo import MODEL_DIRECTORY
from jaxserve.demo.tasks import (
    TASKS,
    WORDINGS,
    Item,
    UnknownQuestionError,
    chat_messages,
    completion_answer,
    completion_prompt,
    held_out,
    is_correct,
    is_held_out,
    problem_of,
    training_items,
)
from scripts.demo.model_directory import config, weight_shapes, write_model_directory
from scripts.demo.training_text import (
    ROW_TOKENS,
    TextMix,
    chat_example,
    completion_example,
    packed_batches,
    training_examples,
)


def solve(item: Item) -> str:
    """Answer from the question's own characters, independently of `Problem.answer`."""
    if item.task == "sum":
        left, right = (
            int(word.strip("?")) for word in item.question.replace("+", " ").split() if word.strip("?").isdigit()
        )
        return str(left + right)
    if item.task == "sort":
        return " ".join(map(str, sorted(int(word) for word in item.question.split() if word.isdigit())))
    word = "".join(problem_of(item.question).operands)
    assert word in item.question
    return "".join(reversed(word)) if item.task == "reverse" else str(sum(1 for _ in word))


@pytest.mark.parametrize("task", TASKS)
def test_held_out_items_are_right_distinct_and_repeatable(task: str) -> None:
    items = held_out(task, 500)
    assert len(items) == 500
    assert len({problem_of(item.question) for item in items}) == 500
    assert items == held_out(task, 500)
    assert items[:100] == held_out(task, 100)
    assert items != held_out(task, 500, seed=1)
    for item in items:
        assert item.task == task
        assert item.answer == solve(item)


def test_training_never_sees_a_held_out_problem_in_any_wording() -> None:
    trained = list(islice(training_items(seed=0), 20_000))
    assert {item.task for item in trained} == set(TASKS)
    assert not any(is_held_out(item.question) for item in trained)
    problems = {problem_of(item.question) for item in trained}
    for task in TASKS:
        items = held_out(task, 500)
        assert all(is_held_out(item.question) for item in items)
        assert problems.isdisjoint(problem_of(item.question) for item in items)


def test_being_held_out_does_not_depend_on_the_wording() -> None:
    for item in held_out("reverse", 20):
        (word,) = problem_of(item.question).operands
        assert all(is_held_out(wording.format(word)) for wording in WORDINGS["reverse"])


def test_about_a_tenth_of_the_problems_is_held_out() -> None:
    questions = [f"What is {left} + {right}?" for left in range(100) for right in range(100)]
    assert 0.08 < sum(is_held_out(question) for question in questions) / len(questions) < 0.12


def test_training_items_follow_seed_and_weights() -> None:
    assert list(islice(training_items(3), 50)) == list(islice(training_items(3), 50))
    assert list(islice(training_items(3), 50)) != list(islice(training_items(4), 50))
    assert {item.task for item in islice(training_items(0, {"count": 1.0, "sort": 1.0}), 100)} == {"count", "sort"}


def test_operands_stay_in_the_promised_ranges() -> None:
    for item in islice(training_items(1), 5_000):
        operands = problem_of(item.question).operands
        if item.task == "sum":
            assert all(0 <= int(operand) <= 999 for operand in operands)
        elif item.task == "sort":
            numbers = [int(number) for number in operands[0].split()]
            assert 3 <= len(numbers) <= 8
            assert all(0 <= number <= 99 for number in numbers)
        else:
            assert 3 <= len(operands[0]) <= 12
            assert operands[0].isalpha()
            assert operands[0].islower()


@pytest.mark.parametrize(
    ("item", "short"),
    [
        (Item("sum", "Add 12 and 34", "46"), "12+34="),
        (Item("sort", "Sort 5 3 9", "3 5 9"), "sort 5 3 9:"),
        (Item("reverse", "Spell tree backwards", "eert"), "reverse tree:"),
        (Item("count", "How many letters in tree?", "4"), "count tree:"),
    ],
)
def test_completion_prompt_is_one_of_two_forms(item: Item, short: str) -> None:
    prompt = completion_prompt(item)
    assert prompt in (short, f"Q: {item.question}\nA:")
    assert completion_answer(item) == (item.answer if prompt.endswith("=") else f" {item.answer}")


@pytest.mark.parametrize("task", TASKS)
def test_both_completion_forms_occur(task: str) -> None:
    in_long_form = sum(completion_prompt(item).startswith("Q: ") for item in held_out(task, 200))
    assert 60 < in_long_form < 140


def test_chat_has_one_user_turn() -> None:
    item = Item("sum", "What is 2 + 3?", "5")
    assert chat_messages(item) == [{"role": "user", "content": "What is 2 + 3?"}]


def test_checker_forgives_only_outer_space() -> None:
    item = Item("sort", "Sort 5 3 9", "3 5 9")
    assert is_correct(item, " 3 5 9\n")
    assert not is_correct(item, "3 5  9")
    assert not is_correct(item, "3 5 9 9")
    assert not is_correct(item, "")


def test_unknown_question_and_task_are_errors() -> None:
    with pytest.raises(UnknownQuestionError, match="demo model's wordings, got 'Why is the sky blue"):
        is_held_out("Why is the sky blue?")
    with pytest.raises(ValueError, match="unknown task 'sing'; tasks: sum, sort, reverse, count"):
        held_out("sing", 1)


def test_model_directory_is_complete_and_small() -> None:
    names = {path.name for path in MODEL_DIRECTORY.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_DIRECTORY.iterdir()) <= 4_000_000


def test_model_directory_is_what_the_training_script_writes(tmp_path: Path) -> None:
    write_model_directory(tmp_path)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == json.loads((MODEL_DIRECTORY / path.name).read_text())
    stored = (MODEL_DIRECTORY / "model.safetensors").read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == weight_shapes()
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert config()["tie_word_embeddings"] is True


def test_packing_keeps_every_example_whole_and_apart() -> None:
    mix = TextMix((0.4, 0.2, 0.3, 0.1), single_chats=0.4, double_chats=0.3)
    examples = list(islice(training_examples(mix, seed=5), 200))
    assert all(len(example.token_ids) <= ROW_TOKENS for example in examples)
    batches = list(packed_batches(examples, num_rows=8))
    assert len(batches) > 1
    found: list[tuple[list[int], list[bool]]] = []
    for batch in batches:
        for segment in range(1, batch.segments.max() + 1):
            places = batch.segments == segment
            assert places.any(axis=1).sum() == 1
            found.append((batch.token_ids[places].tolist(), batch.is_answer[places].tolist()))
    assert found == [(example.token_ids, example.is_answer) for example in examples]


def test_an_example_is_wrong_when_one_answer_token_is() -> None:
    items = held_out("sum", 3)
    (batch,) = packed_batches(map(chat_example, items), num_rows=2)
    predicted = np.roll(batch.token_ids, -1, axis=1)
    assert batch.num_wrong(predicted) == 0
    predicted[0, int(batch.is_answer[0].argmax()) - 1] += 1
    assert batch.num_wrong(predicted) == 1


@pytest.mark.parametrize("task", TASKS)
def test_training_texts_are_what_tokenizer_and_chat_template_give(task: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    first, second = held_out(task, 2)
    turns = [
        *chat_messages(first),
        {"role": "assistant", "content": first.answer},
        *chat_messages(second),
        {"role": "assistant", "content": second.answer},
    ]
    chat = tokenizer.apply_chat_template(turns, tokenize=False)
    assert chat_example(first, second).token_ids == tokenizer(chat, add_special_tokens=False).input_ids
    completion = completion_prompt(first) + completion_answer(first)
    assert completion_example(first).token_ids == [*tokenizer(completion).input_ids, tokenizer.eos_token_id]


def test_tokenizer_decodes_exactly_and_keeps_one_token_a_character() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    for text in ("sort 5 3 9:", "  two  spaces ,.?\n", "Q: 12 + 34\nA:", "h\u00e9llo \u2603 \U0001f600"):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer("reverse abc:").input_ids) == 1 + len("reverse abc:")


def test_chat_template_writes_turns_with_one_beginning_token() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    turns = [
        {"role": "user", "content": "Count abc"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sort 2 1 0"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|user|>Count abc<|assistant|>3</s><|user|>Sort 2 1 0<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert len(ids) == 5 + 1 + len("Count abc3Sort 2 1 0")
