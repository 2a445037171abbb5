"""Step buffers against a slow construction, row by row, from random plans."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.api.sampling_options import OptionValues
from jaxserve.device.batch import build
from jaxserve.device.sampler_batch import SamplerShape, unpack_sampler
from jaxserve.device.slots import Slots
from jaxserve.device.step_batch import BatchShape, LatestTokens, StepBatch, sampler_part, unpack
from jaxserve.scheduling.plan import ON_DEVICE, ChunkPooling, PageGrant, Sampling, SlotSetup, StepPlan
from jaxserve.scheduling.plan_codec import SentRows, decode_plans, encode_plans
from tests.plan_rows import Row, decode_rows, make_plan, rows_of

NUM_SLOTS, PAGE_SIZE, NUM_PAGES, TABLE_PAGES = 6, 8, 40, 5
DECODE = BatchShape(num_tokens=4, num_rows=4, table_pages=TABLE_PAGES, decode_only=True)
MIXED = BatchShape(num_tokens=32, num_rows=5, table_pages=TABLE_PAGES, decode_only=False)
VOCAB_SIZE = 1000
NEUTRAL = (0.5, -3.0)  # what two processors read of requests that give them nothing

LATEST = LatestTokens(*np.random.default_rng(7).integers(0, 300, (2, NUM_SLOTS), np.int32))  # where nothing else is


@functools.cache
def call_unpack(shape: BatchShape) -> Callable[..., StepBatch]:
    call = jax.jit(lambda buffer, latest: unpack(buffer, shape, latest, PAGE_SIZE, NUM_PAGES))
    return lambda buffer, latest=LATEST: call(buffer, latest)


@dataclasses.dataclass
class Slot:
    """A request as the test keeps it: its numbers, its pages in order, and how many tokens are computed."""

    setup: SlotSetup
    pages: list[int]
    computed: int = 0


class PlanMaker:
    """Random plans that a scheduler could make, and the slots as they stand after each."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.slots: dict[int, Slot] = {}
        self.free = [int(page) for page in self.random.permutation(NUM_PAGES)]
        self.index = 0
        self.latest = LatestTokens(*self.random.integers(0, 900, (2, NUM_SLOTS), np.int32))

    def next(self, decode_only: bool, shape: BatchShape) -> StepPlan:
        """A plan that fits the shape; slots change hands now and then."""
        setups, grants = [], []
        if not decode_only:
            setups = [self._replace(slot) for slot in range(NUM_SLOTS) if self.random.random() < 0.3]
        ready = [slot for slot in self.slots if 0 < self.slots[slot].computed < TABLE_PAGES * PAGE_SIZE]
        decode = [slot for slot in self.random.permutation(ready).astype(int).tolist() if self.random.random() < 0.7]
        decode = decode[: shape.num_rows]
        positions = [self.slots[slot].computed for slot in decode]
        starts = [ON_DEVICE if self.random.random() < 0.5 else position for position in positions]
        tokens = [int(token) for token in self.random.integers(-1, 900, len(decode))]
        self.latest.positions[decode] = positions
        for slot in decode:
            grants += self._extend(slot, 1)
        prefill = []
        if not decode_only:
            room = shape.num_tokens - len(decode)
            for slot in sorted(set(self.slots) - set(decode), key=lambda slot: self.random.random()):
                most = min(room, TABLE_PAGES * PAGE_SIZE - self.slots[slot].computed)
                if most > 0 and len(decode) + len(prefill) < shape.num_rows:
                    prefill.append(self._chunk(slot, int(self.random.integers(1, most + 1))))
                    grants += self._extend(slot, len(prefill[-1].token_ids))
                    room -= len(prefill[-1].token_ids)
        self.index += 1
        return make_plan(self.index, setups, grants, decode_rows(decode, starts, tokens) + prefill)

    def _replace(self, slot: int) -> SlotSetup:
        if slot in self.slots:
            self.free += self.slots.pop(slot).pages
        draw = self.random
        sampling = Sampling(
            OptionValues(
                temperature=float(np.float32(draw.random())),
                top_k=int(draw.integers(0, 100)),
                top_p=float(np.float32(1 - draw.random())),
                min_p=float(np.float32(draw.random())),
                presence_penalty=float(np.float32(draw.normal())) * (draw.random() < 0.5),
                frequency_penalty=float(np.float32(draw.normal())),
                repetition_penalty=float(np.float32(draw.random())),
            ),
            seed=int(draw.integers(0, 2**32)),
            num_logprobs=int(draw.integers(-1, 5)),
            arguments=tuple(draw.normal(size=2).astype(np.float32).tolist()) if draw.random() < 0.5 else (),
        )
        if draw.random() < 0.5:
            without = sampling.options._replace(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
            sampling = sampling._replace(options=without)
        known = [7] * int(draw.integers(1, 30)) if sampling.has_penalties else []
        setup = SlotSetup(slot, sampling, int(draw.integers(1, 1000)), known)
        self.slots[slot] = Slot(setup, [])
        return setup

    def _extend(self, slot: int, num_tokens: int) -> list[PageGrant]:
        facts = self.slots[slot]
        facts.computed += num_tokens
        first, needed = len(facts.pages), -(-facts.computed // PAGE_SIZE)
        pages = [self.free.pop() for _ in range(needed - first)]
        facts.pages += pages
        return [PageGrant(slot, first, pages)] if pages else []

    def _chunk(self, slot: int, count: int) -> Row:
        token_ids = [int(token) for token in self.random.integers(0, 900, count)]
        targets = None
        if self.random.random() < 0.5:
            targets = [int(token) for token in self.random.integers(-1, 900, count)]
        pooling = None
        if self.random.random() < 0.5:
            num_pooled = 1 if self.random.random() < 0.5 else count
            pooling = ChunkPooling(0, num_pooled, bool(self.random.random() < 0.5), False)
        num_samples = int(self.random.random() < 0.5)
        return Row(slot, self.slots[slot].computed, token_ids, num_samples, targets, pooling)

    def rows(self, plan: StepPlan) -> list[Row]:
        """The plan's rows with the starts and tokens that are on the device."""
        rows = []
        for row in rows_of(plan):
            start = self.latest.positions[row.slot] if row.start == ON_DEVICE else row.start
            latest = int(self.latest.token_ids[row.slot])
            token_ids = [latest if token == ON_DEVICE else token for token in row.token_ids]
            rows.append(row._replace(start=int(start), token_ids=token_ids))
        return rows


def check_batch(batch: StepBatch, rows: list[Row], slots: dict[int, Slot], shape: BatchShape) -> None:
    """Compare every element of a batch with what the rows and the slots say."""
    attention, token, num_target_tokens = batch.attention[0], 0, 0
    for r, row in enumerate(rows):
        facts, count = slots[row.slot], len(row.token_ids)
        assert (attention.query_starts[r], attention.query_lens[r]) == (token, count)
        assert attention.context_lens[r] == row.start + count == facts.computed
        num_pages = len(facts.pages)
        assert attention.page_table[r].tolist() == facts.pages + [NUM_PAGES] * (TABLE_PAGES - num_pages)
        assert batch.slots[r] == row.slot
        if row.num_samples:
            assert batch.sampler.sampled_slots[r] == row.slot
        else:
            assert batch.sampler.sampled_slots[r] >= NUM_SLOTS, (
                "a row that does not sample would set a slot's latest token"
            )
        assert batch.sampled_tokens[r] == token + count - 1
        check_pooling(batch, r, row, token + count)
        sampling = facts.setup.sampling
        inputs = batch.sampler.inputs
        assert tuple(array[r] for array in inputs.options) == sampling.options
        assert int(inputs.seeds[r]) % 2**32 == sampling.seed
        assert (inputs.positions[r], inputs.slots[r]) == (attention.context_lens[r], row.slot)
        if inputs.arguments.size:
            assert tuple(inputs.arguments[r].tolist()) == (sampling.arguments or NEUTRAL)
        is_new = row.start >= len(facts.setup.token_ids)
        assert (batch.counted_slots[r] == row.slot) == (sampling.has_penalties and is_new)
        assert batch.counted_slots[r] in (row.slot, NUM_SLOTS)
        for i, token_id in enumerate(row.token_ids):
            position = row.start + i
            assert (batch.tokens[token], batch.positions[token]) == (token_id, position)
            assert batch.lengths[token] == facts.setup.final_length
            assert attention.token_pages[token] == facts.pages[position // PAGE_SIZE]
            assert attention.token_offsets[token] == position % PAGE_SIZE
            assert batch.targets[token] == (-1 if row.targets is None else row.targets[i])
            token += 1
            num_target_tokens = token if row.targets is not None else num_target_tokens
    lengths = [len(row.token_ids) for row in rows]
    num_single = next((r for r, length in enumerate(lengths) if length > 1), len(rows))
    assert (attention.num_single, attention.num_rows) == (num_single, len(rows))
    assert batch.sampler.num_rows == len(rows)
    assert batch.num_target_tokens == num_target_tokens
    single = [slots[row.slot] for row in rows[:num_single]]
    num_full = min((facts.computed // PAGE_SIZE for facts in single), default=0)
    same = [len({facts.pages[i] for facts in single}) == 1 for i in range(num_full)]
    assert attention.num_shared_pages == (same.index(False) if False in same else num_full)
    check_padding(batch, token, len(rows), shape)


def check_pooling(batch: StepBatch, r: int, row: Row, end: int) -> None:
    """Which tokens of a row, whose last is before ``end``, enter its slot's sum; decode steps have no such numbers."""
    if not len(batch.pooled_from):
        assert not len(batch.carried_slots) and row.pooling is None
    elif row.pooling is None:
        assert batch.pooled_from[r] >= end
    else:
        assert batch.pooled_from[r] == end - row.pooling.num_tokens
        assert (batch.carried_slots[r] == row.slot) == (not row.pooling.is_first)
        assert batch.carried_slots[r] in (row.slot, NUM_SLOTS)


def check_padding(batch: StepBatch, num_tokens: int, num_rows: int, shape: BatchShape) -> None:
    """Padding reads no page, writes no page, and belongs to no slot."""
    attention, sampler = batch.attention[0], batch.sampler
    inputs = sampler.inputs
    assert (attention.token_pages[num_tokens:] > NUM_PAGES).all(), "the null page must stay clean"
    assert (attention.page_table[num_rows:] == NUM_PAGES).all()
    assert (attention.context_lens[num_rows:] == 0).all() and (attention.query_lens[num_rows:] == 0).all()
    assert (attention.query_starts[num_rows:] == shape.num_tokens).all()
    assert (batch.counted_slots[num_rows:] >= NUM_SLOTS).all()
    assert (batch.slots[num_rows:] >= NUM_SLOTS).all() and (sampler.sampled_slots[num_rows:] >= NUM_SLOTS).all()
    assert (batch.targets[num_tokens:] == -1).all()
    assert (batch.pooled_from[num_rows:] == shape.num_tokens).all()
    assert (batch.carried_slots[num_rows:] >= NUM_SLOTS).all()
    assert (batch.tokens[num_tokens:] >= 0).all(), "-1 would look up a slot"
    for name in ("temperature", "min_p", "top_k", "presence_penalty", "frequency_penalty"):
        assert (getattr(inputs.options, name)[num_rows:] == 0).all(), f"padding asks for {name}"
    assert (inputs.options.top_p[num_rows:] == 1).all() and (inputs.options.repetition_penalty[num_rows:] == 1).all()
    neutral = np.tile(NEUTRAL[: inputs.arguments.shape[1]], (shape.num_rows - num_rows, 1))
    assert np.array_equal(inputs.arguments[num_rows:], neutral)


@pytest.mark.parametrize("seed", range(12))
def test_buffers_hold_what_plans_say(seed: int) -> None:
    """Also with logits processors that read arguments."""
    maker, slots = PlanMaker(seed), Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, NEUTRAL)
    for step in range(15):
        shape = dataclasses.replace(DECODE if step % 3 == 2 else MIXED, num_arguments=len(NEUTRAL))
        plan = maker.next(shape.decode_only, shape)
        slots.apply(plan)
        buffer = build(slots, plan, shape, variant=step % 3)
        assert buffer.dtype == np.int32 and buffer.shape == (shape.buffer_size,)
        batch = jax.tree.map(np.asarray, call_unpack(shape)(buffer, maker.latest))
        check_batch(batch, maker.rows(plan), maker.slots, shape)
        assert batch.sampler.variant == step % 3


@pytest.mark.parametrize("seed", range(6))
def test_plans_that_were_sent_make_the_same_buffers(seed: int) -> None:
    """Byte for byte, as in a group of processes: the rows of some plans are sent by their number alone."""
    maker, writer, reader = PlanMaker(seed), SentRows(), SentRows()
    mine, theirs = (Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, NEUTRAL) for _ in range(2))
    previous, num_named = None, 0
    for step in range(40):
        shape = dataclasses.replace(DECODE if step % 4 else MIXED, num_arguments=len(NEUTRAL))
        plan = maker.next(shape.decode_only, shape) if step % 4 < 2 or previous is None else again(maker, previous)
        if previous is not None:
            plan.compare_rows(previous)
        (sent,) = reader.restore(decode_plans(encode_plans([plan], writer)))
        assert sent.rows_number == plan.rows_number
        num_named += plan.same_rows_as is not None
        for ours, other in zip(mine.apply(plan), theirs.apply(sent), strict=True):
            np.testing.assert_array_equal(ours, other)
        assert mine.variant(plan) == theirs.variant(sent)
        buffers = [build(slots, each, shape, step % 3) for slots, each in ((mine, plan), (theirs, sent))]
        assert buffers[0].tobytes() == buffers[1].tobytes()
        previous = plan
    assert num_named > 3


def again(maker: PlanMaker, previous: StepPlan) -> StepPlan:
    """A plan with the rows of a decode step, which start where the device is."""
    maker.index += 1
    return make_plan(maker.index, [], [], decode_rows(list(previous.slots), [ON_DEVICE] * previous.num_rows))


def test_buffers_do_not_share_memory() -> None:
    """The step before may still read its buffer when the next is built."""
    slots = Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE)
    plan = make_plan(0, [SlotSetup(0, Sampling(), 9)], [PageGrant(0, 0, [3])], [Row(0, 0, [5], 1)])
    slots.apply(plan)
    first, second = build(slots, plan, MIXED, 0), build(slots, plan, MIXED, 0)
    second[...] = 7
    assert not np.shares_memory(first, second) and not (first == 7).all()
    assert not np.shares_memory(first, slots.page_tables)


def test_a_new_request_does_not_inherit_its_slot() -> None:
    """Pages, penalties and arguments of the request before are gone."""
    slots = Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, NEUTRAL)
    shape = dataclasses.replace(DECODE, num_arguments=2)
    busy = Sampling(OptionValues(temperature=1.0, presence_penalty=1.0), arguments=(1.0, 2.0), num_logprobs=2)
    for sampling, pages, counted_slot, variant in [(busy, [3, 4], 2, "full"), (Sampling(), [9], NUM_SLOTS, "greedy")]:
        plan = make_plan(0, [SlotSetup(2, sampling, 9)], [PageGrant(2, 0, pages)], decode_rows([2], [0], [5]))
        slots.apply(plan)
        expected = pages + [NUM_PAGES] * (TABLE_PAGES - len(pages))
        batch = jax.tree.map(np.asarray, call_unpack(shape)(build(slots, plan, shape, 0)))
        assert batch.attention[0].page_table[0].tolist() == expected
        assert batch.counted_slots[0] == counted_slot
        assert tuple(batch.sampler.inputs.arguments[0].tolist()) == (sampling.arguments or NEUTRAL)
        assert slots.variant(plan) == variant


def test_the_sampler_finds_its_part_of_the_buffer() -> None:
    """It lies the same in decode and mixed steps with the same number of rows."""
    sampling = Sampling(OptionValues(temperature=0.5, top_k=7), seed=5, arguments=(1.0, 2.0))
    slots = Slots(NUM_SLOTS, TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, NEUTRAL)
    setups, grants = [SlotSetup(2, sampling, 9)], [PageGrant(2, 0, [3])]
    decode = make_plan(0, setups, grants, decode_rows([2], [6], [5]))
    mixed = make_plan(1, [], [], [Row(2, 4, [8, 9, 5], 1)])
    shapes = [DECODE, dataclasses.replace(MIXED, num_rows=DECODE.num_rows)]
    parts = []
    for shape, plan in zip(shapes, (decode, mixed), strict=True):
        shape = dataclasses.replace(shape, num_arguments=len(NEUTRAL))
        slots.apply(plan)
        buffer = build(slots, plan, shape, variant=1)
        batch = call_unpack(shape)(buffer)
        parts.append(np.asarray(sampler_part(jnp.asarray(buffer), shape, batch)))
        found = unpack_sampler(jnp.asarray(parts[-1]), shape.sampler)
        for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(batch.sampler), strict=True):
            np.testing.assert_array_equal(array, other)
    np.testing.assert_array_equal(*parts)
    assert parts[0].shape == (SamplerShape(4, 4, num_arguments=len(NEUTRAL)).size,)


def test_the_simplest_sampler_is_chosen() -> None:
    """By the rows that sample: the numbers of a prompt's inner chunk do not count."""
    needy = [
        Sampling(num_logprobs=0),
        Sampling(OptionValues(presence_penalty=0.1)),
        Sampling(OptionValues(frequency_penalty=-0.1)),
        Sampling(OptionValues(repetition_penalty=1.1)),
        Sampling(logit_bias=((3, 1.0),)),
        Sampling(tracked_ids=(3,)),
        Sampling(arguments=(0.5, 1.0)),
    ]
    easy = [Sampling(), Sampling(OptionValues(temperature=0.5)), Sampling(arguments=NEUTRAL)]
    samplings = dict(enumerate([*easy, *needy]))
    slots = Slots(len(samplings), TABLE_PAGES, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, NEUTRAL)
    slots.apply(make_plan(0, [SlotSetup(slot, samplings[slot], 99) for slot in samplings], [], []))

    def variant(decode: list[int], *prefill: Row, is_masked: bool = False) -> str:
        return slots.variant(make_plan(0, [], [], [*decode_rows(decode, [5] * len(decode)), *prefill]), is_masked)

    assert variant([0]) == variant([0, 2]) == "greedy"
    assert variant([0, 1]) == "sampled"
    for slot in range(3, len(samplings)):
        assert variant([0, slot]) == variant([1, slot]) == "full", samplings[slot]
    assert variant([0], is_masked=True) == "full"
    assert variant([0], Row(1, 0, [4, 4], 1)) == "sampled"
    assert variant([0], Row(1, 0, [4, 4], 0), Row(3, 0, [4], 0)) == "greedy"
    assert variant([], Row(4, 0, [4], 1)) == "full"
