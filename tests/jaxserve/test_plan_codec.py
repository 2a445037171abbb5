"""Plans as bytes: whatever a plan has comes back equal, and nothing but plans comes back."""

import dataclasses
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.api.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.scheduling.plan import (
    ChunkPooling,
    ChunkTargets,
    PageCopy,
    PageGrant,
    Sampling,
    SlotMask,
    SlotSetup,
    StateSnapshot,
    StepPlan,
)
from jaxserve.scheduling.plan_codec import SentRows, decode_plans, encode_plans

INT = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(allow_nan=False)
IDS = st.lists(INT, max_size=5).map(tuple)
OPTIONS = {name: INT if isinstance(row.neutral, int) else FLOAT for name, row in SAMPLING_OPTIONS.items()}
SAMPLINGS = st.builds(
    Sampling,
    options=st.builds(OptionValues, **OPTIONS),
    seed=st.integers(0, 2**32 - 1),
    num_logprobs=INT,
    banned_ids=IDS,
    banned_until=INT,
    bad_ids=IDS,
    allowed_ids=st.none() | IDS,
    logit_bias=st.lists(st.tuples(INT, FLOAT), max_size=3).map(tuple),
    tracked_ids=IDS,
    arguments=st.lists(FLOAT, max_size=3).map(tuple),
)
COLUMN = st.lists(INT, max_size=9).map(lambda numbers: array("i", numbers))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "number": st.integers(0, 2**62),
    "setups": st.lists(st.builds(SlotSetup, INT, SAMPLINGS, INT, IDS, INT, INT), max_size=3),
    "grants": st.lists(st.builds(PageGrant, INT, INT, st.lists(INT), INT), max_size=3),
    "copies": st.lists(st.builds(PageCopy, INT, INT), max_size=3),
    "state_copies": st.lists(st.builds(PageCopy, INT, INT), max_size=3),
    "snapshots": st.lists(st.builds(StateSnapshot, INT, INT, INT), max_size=3),
    "masks": st.lists(st.builds(SlotMask, INT, st.binary(max_size=16), INT), max_size=3),
    "slots": COLUMN,
    "starts": COLUMN,
    "lengths": COLUMN,
    "num_samples": COLUMN,
    "token_ids": COLUMN,
    "targets": st.lists(st.builds(ChunkTargets, INT, st.lists(INT)), max_size=3),
    "pooling": st.lists(st.builds(ChunkPooling, INT, INT, st.booleans(), st.booleans()), max_size=3),
    "same_rows_as": st.none() | st.integers(0, 2**62),
    "num_drafts": st.integers(0, 64),
}


@given(st.lists(st.builds(StepPlan, **FIELDS), max_size=3))
def test_plans_come_back_equal(plans: list[StepPlan]) -> None:
    """Every field, each of its own type."""
    decoded = decode_plans(encode_plans(plans))
    assert decoded == plans
    assert [types_of(plan) for plan in decoded] == [types_of(plan) for plan in plans]
    assert encode_plans(decoded) == encode_plans(plans)


def types_of(value: Any) -> Any:
    """The types of a value and of all that it is made of."""
    if isinstance(value, StepPlan):
        return [types_of(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return type(value), [types_of(each) for each in value] if isinstance(value, list | tuple) else ()


def test_every_field_is_drawn() -> None:
    assert [*FIELDS] == [field.name for field in dataclasses.fields(StepPlan)]
    plan = StepPlan(3)
    plan.add_decode_rows([2, 5])
    assert encode_plans([plan]) == msgpack.packb(
        [[3, [], [], [], [], [], [], [2, 5], [-1, -1], [1, 1], [1, 1], [-1, -1], [], [], None, 0]]
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_rows_that_were_sent_are_named_by_number(steps: list[tuple[int, bool]]) -> None:
    """Steps of some microbatches in any order, each with the rows that it had before or with new ones."""
    writer, reader, latest = SentRows(), SentRows(), dict[int, StepPlan]()
    for number, (microbatch, is_new) in enumerate(steps):
        plan, before = StepPlan(number, grants=[PageGrant(0, number, [1])]), latest.get(microbatch)
        plan.add_decode_rows([microbatch] * (number if is_new or before is None else before.num_rows))
        if before is not None:
            plan.compare_rows(before)
        latest[microbatch] = plan
        other = StepPlan(-1, same_rows_as=-1)  # a lane without work
        found = reader.restore(decode_plans(encode_plans([plan, other], writer)))
        assert found == [plan, other]


def test_a_step_that_changes_nothing_is_short() -> None:
    """Of 64 rows nothing is sent again; in another lane a row is new."""
    writer, plans = SentRows(), [StepPlan(1 << 30), StepPlan((1 << 30) + 1)]
    for plan in plans:
        plan.add_decode_rows(range(64))
    plans[1].compare_rows(plans[0])
    first, second = (encode_plans([plan], writer) for plan in plans)
    assert len(first) > 300 and len(second) <= 64
    assert plans[1].num_rows == 64, "the plan itself keeps its rows"


@pytest.mark.parametrize("data", [b"", b"\xc1", encode_plans([StepPlan(1)])[:-1], msgpack.packb([[1, 2]]), b"\x07"])
def test_other_bytes_are_no_plans(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"expected encoded step plans, got {len(data)} other bytes"):
        decode_plans(data)


def test_a_plan_has_numbers_only() -> None:
    with pytest.raises(TypeError, match="a plan cannot have a StepPlan"):
        encode_plans([StepPlan(1, setups=[StepPlan(2)])])  # pyright: ignore[reportArgumentType]
