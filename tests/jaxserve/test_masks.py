"""Masks of rows: their bits, when they apply, and what is left where rules leave nothing."""

import jax
import numpy as np
import pytest

from jaxserve.device.held_masks import HeldMasks
from jaxserve.device.slots import MaskedSample, TokenMasks
from jaxserve.scheduling.plan import Sampling, SlotMask, SlotSetup, StepPlan
from jaxserve.scheduling.row_starts import RowStarts
from tests.plan_rows import Row, decode_rows, make_plan
from tests.sampler_rows import mask_of


def decode_plan(slots: dict[int, int], *masks: SlotMask, prefill: tuple[Row, ...] = ()) -> StepPlan:
    """Slots and the positions of their input tokens."""
    return make_plan(0, [], [], [*decode_rows(slots, slots.values()), *prefill], masks=masks)


def masked_samples(masks: TokenMasks, plan: StepPlan) -> list[MaskedSample]:
    return masks.samples(plan, RowStarts(8), {})


def bits(masks: TokenMasks, plan: StepPlan, num_rows: int, vocab_size: int) -> np.ndarray:
    """Allowed tokens of each row, of one sample each, as booleans."""
    mask = masks.array(masked_samples(masks, plan), num_rows)
    assert mask.dtype == np.int32 and mask.shape == (num_rows, -(-vocab_size // 32))
    return np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)


@pytest.mark.parametrize("vocab_size", [33, 64, 70, 96])
def test_bits(vocab_size: int) -> None:
    """Bits 0, 31, 32, 63 and the last token; rows behind their minimum, and rows without one, are open."""
    banned = {slot: ids for slot, ids in enumerate([(0, 31), (31,), (32,), (63, vocab_size - 1), ()])}
    banned = {slot: tuple(token for token in ids if token < vocab_size) for slot, ids in banned.items()}
    masks = TokenMasks(vocab_size)
    masks.apply(SlotSetup(slot, Sampling(banned_ids=ids, banned_until=20), 99) for slot, ids in banned.items())
    prefill = (Row(3, 10, [1] * 9, 1), Row(4, 0, [1], 1))
    found = bits(masks, decode_plan({2: 18, 0: 18, 1: 19}, prefill=prefill), 7, vocab_size)
    allowed = np.ones((7, vocab_size), bool)
    for row, slot in [(0, 2), (1, 0), (3, 3)]:  # slot 1 samples the token at position 20, which may be any
        allowed[row, list(banned[slot])] = False
    np.testing.assert_array_equal(found, allowed)


def test_no_row_is_masked_where_every_token_is_allowed() -> None:
    """Bans that are over, chunks that do not sample, slots that changed hands, constraints that allow all."""
    masks = TokenMasks(64)
    assert masked_samples(masks, decode_plan({0: 1})) == []
    masks.apply([SlotSetup(slot, Sampling(banned_ids=(3,), banned_until=20), 99) for slot in (0, 1, 2)])
    assert [one.sample for one in masked_samples(masks, decode_plan({0: 18}))] == [0]
    assert masked_samples(masks, decode_plan({0: 19})) == []
    assert masked_samples(masks, decode_plan({}, prefill=(Row(1, 0, [4, 4], 0),))) == []
    assert [one.sample for one in masked_samples(masks, decode_plan({5: 3}, prefill=(Row(1, 0, [4], 1),)))] == [1]
    masks.apply([SlotSetup(2, Sampling(), 99)])
    assert masked_samples(masks, decode_plan({2: 1})) == []


def test_rules_give_way_where_nothing_is_left() -> None:
    """First the bans for a time, then the bad tokens; never the allowed ones, nor a constraint."""
    vocab_size = 40
    cases = {
        0: (Sampling(allowed_ids=(1, 2), bad_ids=(1,), banned_ids=(2,), banned_until=9), None, {2}),
        1: (Sampling(allowed_ids=(1, 2), bad_ids=(1, 2), banned_ids=(2,), banned_until=9), None, {1}),
        2: (Sampling(allowed_ids=(1, 2), bad_ids=(1, 2)), None, {1, 2}),
        3: (Sampling(allowed_ids=(1, 2)), {2, 3}, {2}),
        4: (Sampling(allowed_ids=(1, 2)), {3, 39}, {3, 39}),
        5: (Sampling(banned_ids=(3,), banned_until=9), {3}, {3}),
        6: (Sampling(), {5}, {5}),
        7: (Sampling(bad_ids=(5,)), {5, 6}, {6}),
    }
    masks = TokenMasks(vocab_size)
    masks.apply(SlotSetup(slot, sampling, 99) for slot, (sampling, _, _) in cases.items())
    given = []
    for slot, (_, constraint, _) in cases.items():
        if constraint is not None:
            allowed = np.isin(np.arange(vocab_size), [*constraint])[None]
            given.append(SlotMask(slot, mask_of(allowed).tobytes()))
    found = bits(masks, decode_plan(dict.fromkeys(cases, 3), *given), len(cases), vocab_size)
    for slot, (_, _, expected) in cases.items():
        assert set(np.flatnonzero(found[slot])) == expected, slot


@pytest.mark.parametrize("num_words", [1, 2, 5])
def test_constraints_of_other_lengths(num_words: int) -> None:
    """A grammar's vocabulary may be shorter than the model's, or padded to more words; bits past the end count not."""
    masks = TokenMasks(40)
    plan = decode_plan({0: 3}, SlotMask(0, np.full(num_words, -1, np.int32).tobytes()))
    found = bits(masks, plan, 1, 40)[0]
    assert found.tolist() == [token < num_words * 32 for token in range(40)]
    outside = np.zeros(2, np.uint32)
    outside[1] = 1 << 31  # token 63
    plan = decode_plan({0: 3}, SlotMask(0, outside.tobytes()))
    assert not bits(masks, plan, 1, 40).any(), "nothing but the constraint counts, even where it allows nothing"


def test_each_sample_of_a_row_has_the_mask_of_its_position() -> None:
    """A ban ends within a row; a constraint has masks for some samples; rows before and after have none."""
    masks = TokenMasks(64)
    masks.apply([SlotSetup(0, Sampling(banned_ids=(3,), banned_until=20), 99)])
    rows = [Row(5, 2, [1], 1), Row(0, 17, [1, 2, 3, 4], 4), Row(1, 9, [1, 2, 3], 3), Row(2, 0, [4] * 5, 0)]
    given = [SlotMask(1, np.uint64(1 << token).tobytes(), sample) for sample, token in ((0, 40), (2, 41))]
    plan = make_plan(0, [], [], rows, masks=given)
    assert [one.sample for one in masked_samples(masks, plan)] == [1, 2, 5, 7]
    found = bits(masks, plan, 10, 64)
    expected = np.ones((10, 64), bool)
    expected[1:3, 3] = False  # the tokens at positions 18 and 19
    expected[5] = np.arange(64) == 40
    expected[7] = np.arange(64) == 41
    np.testing.assert_array_equal(found, expected)


def test_masks_stay_on_the_device_while_they_are_the_same() -> None:
    """From the second step on; words may be equal or identical, samples and shapes must be the same."""
    held = HeldMasks(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    masks, made = TokenMasks(64), list[np.ndarray]()

    def get(*words: int, num_samples: int = 4, first: int = 0) -> jax.Array | np.ndarray:
        samples = [MaskedSample(first + i, np.array([word, 0], np.int32)) for i, word in enumerate(words)]

        def make() -> np.ndarray:
            made.append(masks.array(samples, num_samples))
            return made[-1]

        found = held.get(num_samples, [samples], make)
        np.testing.assert_array_equal(found, masks.array(samples, num_samples))
        return found

    one, two, three = get(1, 2), get(1, 2), get(1, 2)
    assert one is made[0] and isinstance(two, jax.Array) and three is two and len(made) == 1
    others = [get(1, 3), get(1), get(1, first=1), get(1, first=1, num_samples=8), get(1, 2)]
    assert [one is other for one, other in zip(others, made[1:], strict=True)] == [True] * 5
    held.forget()
    get(1, 2)
    assert len(made) == 7
