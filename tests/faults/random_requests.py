"""Requests of which much may be wrong, for properties."""

from typing import Any

from hypothesis import strategies as st

from tests.faults.surfaces import Asked, Kind

NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5, 1e-9, 3.0, -3.0, 1e300]), st.floats(-3, 3, allow_nan=False)
)
WHOLE = st.one_of(st.sampled_from([0, 1, 2, -1, -2, 20, 21, 2**31, 2**62, -(2**62)]), st.integers(-5, 50))
IDS = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([-1, 10**6, 2**40])), min_size=1, max_size=4)
TEXTS = st.lists(st.sampled_from(["", "a", "stop", "\u00e9", "x" * 50]), min_size=1, max_size=3)
STRUCTURES = st.sampled_from(
    [
        {"regex": "[0-9]+"},
        {"regex": "("},
        {"choice": ["a", "b"]},
        {"json": '{"type": "object"}'},
        {"json": "{"},
        {"grammar": ""},
    ]
)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "n": WHOLE,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "top_k": WHOLE,
    "min_p": NUMBERS,
    "seed": WHOLE,
    "stop": TEXTS,
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "max_tokens": st.one_of(st.integers(-2, 8), st.just(2**40)),
    "min_tokens": st.integers(-2, 9),
    "logprobs": WHOLE,
    "prompt_logprobs": WHOLE,
    "logprob_token_ids": IDS,
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_reading_prefix_cache": st.booleans(),
    "structured_outputs": STRUCTURES,
    "logit_bias": st.dictionaries(st.sampled_from([1, 5, 10**6, -1]), NUMBERS, min_size=1, max_size=2),
    "allowed_token_ids": st.one_of(IDS, st.just([])),
    "bad_words": TEXTS,
    "thinking_token_budget": WHOLE,
    "repetition_detection": st.fixed_dictionaries({"max_pattern_size": WHOLE, "min_count": WHOLE}),
    "extra_args": st.sampled_from([{"nan_from": 0}, {"other": 1}, {"nan_from": "x"}]),
}
PYTHON_ALONE = {
    "output_kind": "how Python's outputs follow each other; servers choose it",
    "flat_logprobs": "the form of Python's outputs; servers have forms of their own",
}
"""Fields of ``SamplingParams`` that no request of a server has, and why."""

EXTRAS: dict[str, st.SearchStrategy[Any]] = {
    "priority": st.sampled_from([0, 0, 1, -1, 2**62, -(2**63)]),
    "cache_salt": st.sampled_from(["", "a", "\u00e9", "x" * 1000]),
    "truncate_prompt_tokens": st.sampled_from([-(2**62), -2, -1, 0, 1, 3, 256, 257, 2**62]),
}
MESSAGES = st.lists(
    st.builds(
        lambda role, parts: {"role": role, **parts},
        st.sampled_from(["user", "user", "assistant", "system", "tool", "", "wizard"]),
        st.fixed_dictionaries(
            {},
            optional={
                "content": st.sampled_from(["What is 12 + 30?", "", "\u00e9", "{{ 1 }}", "long " * 300]),
                "name": st.sampled_from(["", "x"]),
                "tool_call_id": st.just("x"),
                "reasoning": st.just("So"),
            },
        ),
    ),
    max_size=3,
)
VARIABLES = [{}, {"enable_thinking": True}, {"a": None}, {"a": {"b": 1}}, {"messages": []}, {"tools": 1}]
VARIABLES += [{"bos_token": "x"}, {"a b": 1}, {"add_generation_prompt": False}, {"chat_template": "x"}]
CHAT: dict[str, st.SearchStrategy[Any]] = {
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "chat_template_kwargs": st.sampled_from(VARIABLES),
}
KINDS: tuple[Kind, ...] = ("text", "token_ids", "messages")
PROMPTS: dict[Kind, st.SearchStrategy[Any]] = {
    "text": st.sampled_from(["1+1=", "1+1=", "", " ", "\0", "\u00e9\U0001f600", "1" * 300, "<s>"]),
    "token_ids": st.one_of(st.lists(st.integers(0, 200), max_size=8), IDS, st.just([7] * 300)),
    "messages": MESSAGES,
}


def some_of(table: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the names of a table, with values."""
    names = st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: table[name] for name in chosen}))


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """Requests of which much may be wrong."""
    kind: Kind = draw(st.sampled_from(KINDS))
    return Asked(
        kind=kind,
        prompt=draw(PROMPTS[kind]),
        fields=draw(some_of(FIELDS, 3)),
        extras=draw(some_of(EXTRAS, 1)),
        chat=draw(some_of(CHAT, 2)) if kind == "messages" else {},
    )
