"""Parts of arrays go from the processes that have them to those that want them, and none gets ahead."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.reshard import exchange
from jaxserve.reshard.exchange import Exchange, Part
from tests.jaxserve.group.test_stages import connected, place

COUNT = 3


def part(holders: Sequence[int], values: Any) -> Part:
    """A part with its values."""
    array = np.asarray(values)
    return Part(holders, array.shape, array.dtype, lambda: array)


def share(parts: dict[str, Part], wanted: dict[int, list[str]]) -> list[dict[str, np.ndarray]]:
    """What each process gets."""
    with connected(*(place(rank, COUNT) for rank in range(COUNT))) as peers, ThreadPoolExecutor() as pool:
        exchanges = [Exchange(rank, each) for rank, each in enumerate(peers)]
        return [*pool.map(lambda each: each.share(parts, wanted), exchanges)]


def test_every_process_gets_what_it_wants() -> None:
    values = {
        "a": np.arange(6, dtype=np.int8).reshape(2, 3),
        "b": np.asarray(jnp.ones((3, 1), jnp.bfloat16)),
        "c": np.zeros((0, 4), np.float32),
        "d": np.float32(7),
    }
    holders = {"a": [0], "b": [1, 2], "c": [2], "d": [0, 1]}
    wanted = {0: ["a", "b"], 1: ["a", "b", "c", "d"], 2: ["d"]}
    found = share({name: part(holders[name], value) for name, value in values.items()}, wanted)
    for rank, names in wanted.items():
        assert list(found[rank]) != [] and found[rank].keys() == {*names}
        for name in names:
            assert found[rank][name].dtype == values[name].dtype
            assert np.array_equal(found[rank][name], values[name])


def test_large_parts_come_in_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_FRAME_BYTES", 10)
    values = np.arange(33, dtype=np.int16).reshape(3, 11)
    found = share({"a": part([1], values), "b": part([1], values[::-1])}, {0: ["a", "b"], 2: ["b"]})
    assert np.array_equal(found[0]["a"], values) and np.array_equal(found[2]["b"], values[::-1])
    assert found[1] == {}


def test_what_is_not_wanted_is_not_read() -> None:
    def fail() -> np.ndarray:
        raise AssertionError("it was read")

    assert Exchange().share({"a": part([0], [1]), "b": Part([0], (1,), np.int8, fail)}, {0: ["a"]}).keys() == {"a"}


def test_none_goes_on_before_what_it_has_sent_was_received() -> None:
    """So no process ever has the parts of more than one array in memory."""
    with connected(place(0), place(1)) as (zero, one):
        has_sent = threading.Event()

        def send() -> None:
            Exchange(0, zero).share({"a": part([0], [1, 2])}, {1: ["a"]})
            has_sent.set()

        sending = threading.Thread(target=send)
        sending.start()
        assert not has_sent.wait(0.2)
        found = Exchange(1, one).share({"a": part([0], [1, 2])}, {1: ["a"]})
        sending.join(30)
        assert has_sent.is_set() and found["a"].tolist() == [1, 2]
