"""Plans that a leader sends: any bytes are plans that can be sent again, or no plans."""

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
from jaxserve.scheduling.plan_codec import decode_plans, encode_plans
from tests.fuzzing.target import Target


def run(data: bytes) -> None:
    """Read plans; write them again."""
    try:
        plans = decode_plans(data)
    except ValueError:
        return
    written = encode_plans(plans)
    assert encode_plans(decode_plans(written)) == written


def _full() -> StepPlan:
    options = OptionValues(**{name: row.neutral for name, row in SAMPLING_OPTIONS.items()})
    sampling = Sampling(options, 5, 2, (1,), 3, (4,), (1, 2), ((3, 1.5),), (7,), (0.5,))
    plan = StepPlan(
        2,
        setups=[SlotSetup(0, sampling, 9, (1, 2), 0, 0)],
        grants=[PageGrant(0, 0, [3, 4], 0)],
        copies=[PageCopy(1, 2)],
        state_copies=[PageCopy(3, 4)],
        snapshots=[StateSnapshot(0, 1, 2)],
        masks=[SlotMask(0, b"\xff", 1)],
        targets=[ChunkTargets(0, [5])],
        pooling=[ChunkPooling(0, 3, True, False)],
    )
    plan.add_decode_rows([0, 3])
    return plan


_DECODE = StepPlan(3)
_DECODE.add_decode_rows([2, 5])

TARGET = Target(
    run,
    seeds=(encode_plans([]), encode_plans([_DECODE]), encode_plans([_full(), _DECODE])),
    words=(
        b"\x90",
        b"\x91\x01",
        b"\xc0",
        b"\xcf" + b"\xff" * 8,
        b"\xcb\x7f\xf8\0\0\0\0\0\0",
        b"\xa1a",
        b"\xc3",
        b"\x80",
    ),
    packages=("jaxserve.scheduling.plan_codec", "jaxserve.scheduling.plan"),
)
