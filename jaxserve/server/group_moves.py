"""A move of several groups to another mesh or layout: what each is asked, and what they report together."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.config_checks import MESH_FIELDS, parse_mesh
from jaxserve.api.errors import ConfigError, RequestError

_PAUSE = ("pause_s", "drain_s", "move_s", "warm_up_s")


def mesh_of_each(mesh: str | None, num_groups: int) -> str | None:
    """Return the mesh that each group moves to, from that of all.

    Args:
        mesh: Devices along each axis, such as ``data=2,tensor=2``; None keeps the mesh.
        num_groups: Number of groups.

    Raises:
        RequestError: It is wrong, or has another number of replicas.
    """
    if mesh is None:
        return None
    try:
        sizes = parse_mesh(mesh, {})
    except ConfigError as error:
        raise RequestError(str(error)) from error
    if sizes[MESH_FIELDS["data"]] != num_groups:
        raise RequestError(
            f"mesh={mesh!r} has {sizes[MESH_FIELDS['data']]} replicas, but the engine runs as {num_groups} groups of "
            f"processes, which neither merge nor split: expected data={num_groups}"
        )
    return ",".join(f"{axis}={sizes[name]}" for axis, name in MESH_FIELDS.items() if axis != "data")


def merged_report(reports: Sequence[Mapping[str, Any]], num_groups: int) -> dict[str, Any]:
    """Return the fields of a ``ReshardReport`` about all groups, from those of each that has moved.

    Numbers and ``compile_s`` are sums. Each group pauses alone: the times of the pause are those of the longest one.
    """
    first, longest = reports[0], max(reports, key=lambda report: report["pause_s"])
    merged = dict(first)
    for name, value in first.items():
        if name in _PAUSE:
            merged[name] = longest[name]
        elif isinstance(value, Mapping):
            merged[name] = {**value, "data": num_groups}
        elif not isinstance(value, str):
            merged[name] = sum(report[name] for report in reports)
    return merged
