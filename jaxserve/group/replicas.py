"""Replicas that are groups: each has as many processes, of this machine or of several, and one front end serves all."""

import argparse
import dataclasses
import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.config_checks import MESH_FIELDS, parse_mesh
from jaxserve.api.errors import ConfigError
from jaxserve.api.vllm_arguments import OTHER_NAMES

_DATA = MESH_FIELDS["data"]


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
    """How the replicas of ``jaxserve serve`` run as groups.

    Attributes:
        num_processes: Number of processes of each.
        command: The command of ``jaxserve`` that serves them all.
        join_timeout: See ``GroupConfig``.
        step_timeout: Likewise.
    """

    num_processes: int
    command: Sequence[str]
    join_timeout: float
    step_timeout: float


def mesh_sizes(flags: Sequence[str]) -> dict[str, int] | None:
    """Return the sizes of the mesh's axes that flags ask for, by setting; None if ``serve`` will refuse the flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in MESH_FIELDS.values():
        written = ("--" + name.replace("_", "-"), *OTHER_NAMES.get(name, ()))
        parser.add_argument(*written, dest=name, type=int, default=1)
    parser.add_argument("--mesh")
    try:
        found, _ = parser.parse_known_args(flags)
        sizes = {name: int(getattr(found, name)) for name in MESH_FIELDS.values()}
        if found.mesh is not None:
            sizes = parse_mesh(found.mesh, {name: size for name, size in sizes.items() if size != 1})
    except (ConfigError, argparse.ArgumentError):
        return None
    return sizes if min(sizes.values()) >= 1 else None


def sizes_of(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the mesh's axes that arguments of ``LLM`` ask for, by setting.

    Raises:
        ConfigError: The mesh is wrong.
    """
    given = _with_mesh(arguments)
    return {name: given.get(name) or 1 for name in MESH_FIELDS.values()}


def arguments_of_groups(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of ``LLM`` of each group, from those of all.

    Raises:
        ConfigError: The mesh is wrong.
    """
    given, found = _with_mesh(arguments), list[dict[str, Any]]()
    for index in range(given.get(_DATA) or 1):
        own = {**given, _DATA: 1, "seed": given.get("seed", 0) + index}  # else all would draw the same
        if given.get("mesh") is not None:
            own["mesh"] = ",".join(f"{axis}={own[name]}" for axis, name in MESH_FIELDS.items())
        found.append(own)
    return found


def _with_mesh(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the sizes that their mesh gives."""
    given = dict(arguments)
    return given if given.get("mesh") is None else given | parse_mesh(given["mesh"], given)


def secret_of_group(secret: bytes, nonce: bytes) -> bytes:
    """Return the secret of a group's own connections, new at each start, from that of all nodes."""
    return hmac.new(secret, b"replica\0" + nonce, hashlib.sha256).digest()


def devices_of_replica(sizes: Mapping[str, int]) -> int:
    """Return the number of devices of each replica, from sizes of the mesh's axes by setting."""
    return math.prod(size for name, size in sizes.items() if name != _DATA)


def processes_of_each(count: int, sizes: Mapping[str, int], name: str = "nproc") -> int:
    """Return the number of processes of each replica when all have ``count`` together.

    Args:
        count: Number of processes.
        sizes: Sizes of the mesh's axes, by setting.
        name: The setting that says how many there are.

    Raises:
        ConfigError: The replicas would have different numbers, or processes different numbers of devices.
    """
    num_replicas, num_devices = sizes[_DATA], devices_of_replica(sizes)
    each, rest = divmod(count, num_replicas)
    if rest or not each or num_devices % each:
        fitting = ", ".join(str(num_replicas * number) for number in _divisors(num_devices))
        raise ConfigError(
            f"{name}={count}: each of the {num_replicas} replicas ({_DATA}) needs as many processes, which share its "
            f"{num_devices} {'device' if num_devices == 1 else 'devices'} equally; use one of {fitting}, or 1 process "
            "for all"
        )
    return each


def check_processes(count: int, num_devices: int) -> None:
    """Raise ConfigError unless the processes of a replica can share its devices equally."""
    if num_devices % count:
        raise ConfigError(
            f"processes_per_group={count}: they cannot share the {num_devices} devices of a replica equally; use one "
            f"of {', '.join(map(str, _divisors(num_devices)))}"
        )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
