"""One server with faults to switch on for most of these tests, and its folder of switches."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.server_child import REPOSITORY, RunningServer
from tests.faults.talk import assert_serves, wait_until_idle
from tests.hooks import NAN_PROCESSOR, injected
from tests.server_process import running_server


def faulty_environment(switches: Path) -> dict[str, str]:
    """The environment in which a server's processes have faults."""
    folder = Path(injected.__file__).parent
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}", "JAXSERVE_TEST_FAULTS": str(switches)}


@pytest.fixture(scope="session")
def switches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose files switch faults of the shared server on."""
    return tmp_path_factory.mktemp("switches")


@pytest.fixture(scope="session")
def shared_server(switches: Path) -> Iterator[RunningServer]:
    """A server for all tests that it survives."""
    flags = ("--logits-processors", NAN_PROCESSOR, "--deterministic", "--stall-timeout", "3")
    flags += ("--grpc-keepalive-time", "1", "--grpc-keepalive-timeout", "8")
    with running_server(*flags, environment=faulty_environment(switches)) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; after the test it must be idle and right."""
    yield shared_server
    wait_until_idle(shared_server)
    assert_serves(shared_server)
