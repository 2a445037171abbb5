"""Break updates of recurrent layers on purpose: the comparison with the reference must notice; see
``test_broken_kernels``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import delta_net, mamba2, native_library, recurrent_triton, registry, short_convolution
from pallas_kernels.recurrent_states import Convolution, States
from tests.pallas_kernels.test_broken_kernels import Fault, assert_noticed, replaced

CASES: dict[str, Any] = {
    "delta_net": delta_net.CASES["ragged"],
    "key_decays": delta_net.CASES["key_decays"],
    "mamba2": mamba2.CASES["ragged"],
    "short_convolution": short_convolution.CASES["with_bias"],
}
OPERATION_OF = {name: "delta_net" if name == "key_decays" else name for name in CASES}
ROWS = {name: ("native", "xla") for name in CASES}


def broken_update(implementation: Any, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> Fault:
    """Return a fault that changes the arguments of a call, or its results, which it is given with the arguments."""

    def make(update: Callable[..., Any]) -> Callable[..., Any]:
        def broken(projected: Any, weights: Any, states: Any, rows: Any, **settings: Any) -> Any:
            arguments = (projected, weights, states, rows)
            changed = before(*arguments) if before else arguments
            found = update(*changed, **settings)
            return after(found, arguments) if after else found

        return broken

    return replaced(implementation, "update", make)


def changed_rows(change: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    return lambda projected, weights, states, rows: (projected, weights, states, rows._replace(**change(rows)))


def changed_weights(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def before(projected, weights, states, rows):
        is_alone = isinstance(weights, Convolution)
        convolution = change(weights if is_alone else weights.convolution)
        return projected, convolution if is_alone else weights._replace(convolution=convolution), states, rows

    return before


def later_snapshots(rows: Any) -> dict[str, Any]:
    """One token late; the snapshot of a last token stays."""
    is_last = jnp.isin(rows.snapshot_tokens, rows.starts + rows.lens - 1)
    return {"snapshot_tokens": rows.snapshot_tokens + ~is_last}


def only_first_snapshots(rows: Any) -> dict[str, Any]:
    """One of each row; the tokens of rows that are no snapshots' are not."""
    owners = (rows.snapshot_tokens[:, None] >= rows.starts + rows.lens).sum(1)
    is_first = jnp.concatenate([jnp.ones(1, bool), owners[1:] != owners[:-1]])
    return {"snapshot_tokens": jnp.where(is_first, rows.snapshot_tokens, 1 << 20)}


def swapped_pages(rows: Any) -> dict[str, Any]:
    return {"pages": rows.pages.at[jnp.array([0, 2])].set(rows.pages[jnp.array([2, 0])])}


def tail_not_moved(found: Any, arguments: Any) -> Any:
    y, states = found
    old = arguments[2]
    return y, states._replace(tail=old.tail) if isinstance(states, States) else old


def state_not_written(found: Any, arguments: Any) -> Any:
    y, states = found
    page = arguments[3].pages[2]
    return y, jax.tree.map(lambda new, old: new.at[page].set(old[page]), states, arguments[2])


def padding_row_written(found: Any, arguments: Any) -> Any:
    y, states = found
    page = arguments[3].pages[-1]
    return y, jax.tree.map(lambda new: new.at[page].set(0), states)


BEFORE: dict[str, Callable[..., Any]] = {
    "snapshot_late": changed_rows(later_snapshots),
    "no_snapshot": changed_rows(lambda rows: {"snapshot_tokens": jnp.full_like(rows.snapshot_tokens, 1 << 20)}),
    "one_snapshot_of_a_row": changed_rows(only_first_snapshots),
    "neighbours_page": changed_rows(swapped_pages),
    "never_new": changed_rows(lambda rows: {"are_new": jnp.zeros_like(rows.are_new)}),
    "always_new": changed_rows(lambda rows: {"are_new": jnp.ones_like(rows.are_new)}),
    "taps_reversed": changed_weights(lambda c: c._replace(weight=c.weight[::-1])),
    "channels_shifted": changed_weights(lambda c: c._replace(weight=jnp.roll(c.weight, 1, axis=1))),
}
AFTER: dict[str, Callable[..., Any]] = {
    "tail_not_moved": tail_not_moved,
    "state_not_written": state_not_written,
    "padding_row_written": padding_row_written,
}


def weight_faults(name: str) -> dict[str, Callable[..., Any]]:
    """Parameters of a neighbouring head, or none."""

    def with_field(field: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
        return lambda projected, weights, *others: (
            projected,
            weights._replace(**{field: change(getattr(weights, field))}),
            *others,
        )

    fields = {"delta_net": ("a_log", "dt_bias"), "mamba2": ("a_log", "dt_bias", "d")}.get(OPERATION_OF[name], ())
    faults = {f"{field}_of_the_next_head": with_field(field, lambda x: jnp.roll(x, 1)) for field in fields}
    if OPERATION_OF[name] != "delta_net":
        faults["no_bias"] = changed_weights(lambda c: c._replace(bias=None))
    return faults


def is_slow(name: str, row: str, fault: str) -> bool:
    """Whether other cases cover it: those of native kernels, and with one decay per head what is not about decays."""
    return row == "xla" or (name == "key_decays" and fault not in weight_faults(name))


FAULTS = [
    pytest.param(
        name, row, fault, marks=pytest.mark.slow if is_slow(name, row, fault) else (), id=f"{name}-{row}-{fault}"
    )
    for name, rows in ROWS.items()
    for row in rows
    for fault in (*BEFORE, *AFTER, *(weight_faults(name)))
]


@pytest.mark.parametrize("name, row, fault", FAULTS)
def test_broken_update_is_noticed(monkeypatch, name, row, fault):
    if row == "native" and native_library.unavailable() is not None:
        pytest.skip(f"needs native kernels: {native_library.unavailable()}")
    before = (BEFORE | weight_faults(name)).get(fault)
    operation = OPERATION_OF[name]
    broken = broken_update(registry.load(operation, row), before, AFTER.get(fault))
    assert_noticed(monkeypatch, operation, row, CASES[name], broken)


def of_another(token: int = 0, head: int = 0) -> Fault:
    """Return a fault of the Pallas kernel: a program reads what belongs to an earlier token, or to a head before."""

    def make(apply_rule):
        def broken(state, tokens_ref, own_token, own_head, lanes, layout):
            own_token, own_head = jnp.maximum(own_token - token, 0), jnp.maximum(own_head - head, 0)
            return apply_rule(state, tokens_ref, own_token, own_head, lanes, layout)

        return broken

    return replaced(recurrent_triton, "_apply_rule", make)


def wrong_tile(change: Callable[[Any, Any], Any]) -> Fault:
    """Return a fault of the Pallas kernel: a program has the state of another page or head."""

    def make(tile):
        return lambda ref, page, head, lanes: tile(ref, *change(page, head), lanes)

    return replaced(recurrent_triton, "_tile", make)


TRITON_FAULTS: dict[str, Fault] = {
    "token_before": of_another(token=1),
    "head_before": of_another(head=1),
    "state_of_the_head_before": wrong_tile(lambda page, head: (page, jnp.maximum(head - 1, 0))),
    "another_page": wrong_tile(lambda page, head: (jnp.where(page == 2, 3, page), head)),
}


@pytest.mark.parametrize("fault", TRITON_FAULTS)
@pytest.mark.parametrize("name", ["delta_net", pytest.param("key_decays", marks=pytest.mark.slow), "mamba2"])
def test_broken_triton_kernel_is_noticed(monkeypatch, name, fault):
    assert_noticed(monkeypatch, OPERATION_OF[name], "pallas-interpret", CASES[name], TRITON_FAULTS[fault])
