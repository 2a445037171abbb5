"""The JAX job of a group: its processes see each other's devices, and none outlives the others."""

import contextlib
import logging
import os
from typing import Any

import jax

from jaxserve.group.settings import GroupPlace, jax_has_mtls

logger = logging.getLogger(__name__)

HEARTBEAT_S = 30 * 86_400
"""Seconds without a heartbeat after which JAX kills every process by SIGABRT, without a reason for clients:
more than any machine is suspended, since JAX counts the time in which its processes were stopped too. The group's own
connections do not, and name a process that is stopped, hangs or cannot be reached within seconds."""
_SHUTDOWN_S = 5


def join_job(place: GroupPlace) -> None:
    """Start JAX's distributed runtime; call it before the first JAX operation. Blocks until all processes have.

    Raises:
        RuntimeError: Some did not within the time limit.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(16, os.cpu_count() or 1)))  # see ``sharding.ensure_cpu_devices``
    with contextlib.suppress(AttributeError):  # settings that later versions of JAX may drop
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # else SIGTERM is ignored
    jax.distributed.initialize(
        f"{place.address}:{place.coordinator_port}",
        place.count,
        place.rank,
        coordinator_bind_address=f"{place.address}:{place.coordinator_port}",
        initialization_timeout=int(place.join_timeout),
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
        **_certificates(place),
    )


def _certificates(place: GroupPlace) -> dict[str, Any]:
    """Return the settings with which JAX's coordinator and its clients show each other certificates."""
    if place.certfile is None:
        return {}
    if not jax_has_mtls():
        logger.warning("JAX's own connections are not encrypted: its version is older than 0.11.2")
        return {}
    files = {"mtls_cert_file": place.certfile, "mtls_key_file": place.keyfile, "mtls_ca_file": place.ca_certs}
    return {**files, "verify_secure_credentials": True}
