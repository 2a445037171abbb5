"""Several groups behind one front end: what operators ask reaches all of them, and everybody sees which are up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.api.errors import EngineDeadError, RequestError
from jaxserve.api.metric_types import Counter
from jaxserve.group.replicas import ReplicaGroups
from jaxserve.server.engine_client import EngineClient
from jaxserve.server.engine_groups import EngineGroups
from jaxserve.server.errors import UnavailableError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.services import AdminServicer
from jaxserve.server.metrics import metrics_text
from jaxserve.server.proto.jaxserve.v1 import admin_pb2
from jaxserve.server.settings import ServerConfig
from jaxserve.server.wire import EngineInfo
from tests.jaxserve.server.test_status_page import client_of
from tests.observed_engine import MODEL, engine_numbers


class FakeGroup(EngineClient):
    """A group that is none.

    Attributes:
        calls: What was asked of it, with the arguments.
        is_up: Whether it is ready.
        error: Raised by each call.
        ends: Whether it ends while it is asked something.
        answers: What calls return besides what is known.
        waits: What calls wait for.
    """

    def __init__(self, ends: bool = False):
        self.calls: list[tuple[str, Any]] = []
        self.is_up = True
        self.error: Exception | None = None
        self.ends = ends
        self.answers: dict[str, Any] = {}
        self.waits: asyncio.Event | None = None
        self.moved: dict[str, Any] = {}
        self._renderers = None

    @property
    def is_alive(self) -> bool:
        """Whether it is ready."""
        return self.is_up

    @property
    def info(self) -> EngineInfo:
        """What it runs."""
        if not self.is_up:
            raise UnavailableError("it has ended")
        return EngineInfo(model=MODEL, default_fields={})

    async def _query(self, method: str, **arguments: Any) -> Any:
        self.calls.append((method, next(iter(arguments.values()), None)))
        if self.ends:
            self.is_up, self.error = False, EngineDeadError("it has ended")
        if self.waits is not None:
            await self.waits.wait()
        if self.error is not None:
            raise self.error
        return self.answers.get(method) or {
            "abort": list(arguments.get("request_ids", ())),
            "metrics": engine_numbers(),
        }.get(method)


def groups_of(*groups: FakeGroup) -> EngineGroups:
    """An engine of these groups, which were started."""
    settings = {"model": "demo", "data_parallel_size": len(groups)}
    made = EngineGroups(settings, ServerConfig(), ReplicaGroups(1, ("serve", "demo"), 1.0, 1.0))
    made._groups[:] = groups
    return made


CALLS: dict[str, tuple[Callable[[EngineGroups], Coroutine[Any, Any, Any]], list[Any]]] = {
    "abort": (lambda groups: groups.abort(["a", "b"]), [["a", "b"]] * 2),
    "reset_prefix_cache": (lambda groups: groups.reset_prefix_cache(), [None] * 2),
    "start_profile": (lambda groups: groups.start_profile("out"), ["out/group-0", "out/group-2"]),
    "stop_profile": (lambda groups: groups.stop_profile(), [None] * 2),
    "metrics": (lambda groups: groups.metrics(), [None] * 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_operators_ask_reaches_every_group_that_is_up(name: str) -> None:
    (call, arguments), groups = CALLS[name], [FakeGroup(), FakeGroup(), FakeGroup()]
    groups[1].is_up = False
    engine = groups_of(*groups)
    asyncio.run(call(engine))
    assert [group.calls for group in groups] == [[(name, arguments[0])], [], [(name, arguments[1])]]
    groups[0].error = RequestError("not now")
    with pytest.raises(RequestError, match="not now"):
        asyncio.run(call(engine))
    assert len(groups[2].calls) == 2, "the others have done it"
    groups[0].is_up = groups[2].is_up = False
    with pytest.raises(EngineDeadError):
        asyncio.run(call(engine))


@pytest.mark.parametrize("name", CALLS)
def test_a_group_that_ends_meanwhile_does_not_keep_the_others(name: str) -> None:
    groups = [FakeGroup(ends=True), FakeGroup()]
    asyncio.run(CALLS[name][0](groups_of(*groups)))
    assert len(groups[1].calls) == 1
    with pytest.raises(EngineDeadError):
        asyncio.run(CALLS[name][0](groups_of(FakeGroup(ends=True), FakeGroup(ends=True))))


def test_requests_of_all_groups_are_aborted() -> None:
    assert asyncio.run(groups_of(FakeGroup(), FakeGroup()).abort(["a"])) == ["a", "a"]


REPORT: dict[str, Any] = {
    **{"from_mesh": {"data": 1, "tensor": 4}, "to_mesh": {"data": 1, "stage": 2, "tensor": 2}},
    **{"from_layout": "a", "to_layout": "b", "num_programs": 3, "compile_s": 2.0, "num_pages": 5},
}

MOVED = {"mesh": "stage=2,tensor=2", "layout": "b"}


def report(pause_s: float) -> dict[str, Any]:
    """What a group reports of a move."""
    return {**REPORT, "pause_s": pause_s, "drain_s": pause_s / 2, "move_s": pause_s / 2, "warm_up_s": 0.0}


def test_groups_move_one_after_the_other() -> None:
    groups = [FakeGroup(), FakeGroup(), FakeGroup()]
    groups[1].is_up = False
    for group, pause_s in zip(groups, (1.0, 9.0, 3.0), strict=True):
        group.answers["reshard"] = report(pause_s), EngineInfo(model=MODEL, default_fields={}), MOVED
    found = asyncio.run(groups_of(*groups).reshard("data=3, stage=2,tensor=2", "b"))
    assert [group.calls for group in groups] == [
        [("reshard", "stage=2,tensor=2,expert=1")],
        [],
        [("reshard", "stage=2,tensor=2,expert=1")],
    ]
    meshes = {"from_mesh": {"data": 3, "tensor": 4}, "to_mesh": {"data": 3, "stage": 2, "tensor": 2}}
    assert found == {**report(3.0), **meshes, "num_programs": 6, "compile_s": 4.0, "num_pages": 10}
    assert [group.moved for group in groups] == [MOVED] * 3, "the one that has ended starts where the others are"


def test_moves_that_groups_do_not_make() -> None:
    groups = [FakeGroup(), FakeGroup()]
    engine = groups_of(*groups)
    for mesh, count in (("data=4", 4), ("tensor=2", 1)):
        with pytest.raises(
            RequestError, match=f"has {count} replicas, .* 2 groups of processes, which neither merge nor"
        ):
            asyncio.run(engine.reshard(mesh, None))
    with pytest.raises(RequestError, match="mesh: expected a size"):
        asyncio.run(engine.reshard("rows=2", None))
    assert not groups[0].calls and not groups[1].calls
    groups[0].error = RequestError("too many devices")
    with pytest.raises(RequestError, match="^too many devices$"):
        asyncio.run(engine.reshard(None, "b"))
    groups[0].error, groups[1].error = None, RequestError("too little memory")
    groups[0].answers["reshard"] = report(1.0), EngineInfo(model=MODEL, default_fields={}), MOVED
    with pytest.raises(RequestError, match="group 1 did not move: too little memory; of the groups, 0 have moved"):
        asyncio.run(engine.reshard(None, "b"))
    for group in groups:
        group.is_up = False
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.reshard(None, "b"))


def test_a_move_during_another_one() -> None:
    async def both() -> None:
        group = FakeGroup()
        group.answers["reshard"] = report(1.0), EngineInfo(model=MODEL, default_fields={}), MOVED
        group.waits = asyncio.Event()
        engine = groups_of(group)
        first = asyncio.create_task(engine.reshard(None, "b"))
        while not group.calls:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match="another reshard is running"):
            await engine.reshard(None, "c")
        group.waits.set()
        assert (await first)["to_layout"] == "b"
        assert (await engine.reshard(None, "b"))["to_layout"] == "b"

    asyncio.run(both())


def test_a_drain_ends_the_requests_and_processes_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    async def stop(client: EngineClient, drain_s: float, patience_s: float = 10.0) -> None:
        ended.append((client, drain_s))

    monkeypatch.setattr(EngineClient, "stop", stop)
    monkeypatch.setattr(EngineClient, "fail_requests", lambda client, error: ended.append((client, str(error))))
    engine = EngineGroups({"data_parallel_size": 3}, ServerConfig(), ReplicaGroups(1, ("serve", "demo"), 1.0, 1.0))
    engine.fail_requests(UnavailableError("late"))
    asyncio.run(engine.stop(2.0))
    clients = [group.client for group in engine._processes]
    assert ended == [*((client, "late") for client in clients), *((client, 2.0) for client in clients)]


def test_everybody_sees_which_groups_are_up() -> None:
    groups = [FakeGroup(), FakeGroup()]
    frontend = Frontend(ServerConfig(), groups_of(*groups), "tiny")
    frontend.ledger.open(40)
    text = asyncio.run(metrics_text(frontend))
    assert 'jaxserve:group_up{model_name="tiny",engine="0"} 1' in text
    assert 'jaxserve:num_requests_running{model_name="tiny",engine="1"} 2' in text
    groups[1].is_up = False
    text = asyncio.run(metrics_text(frontend))
    assert 'jaxserve:group_up{model_name="tiny",engine="0"} 1' in text
    assert 'jaxserve:group_up{model_name="tiny",engine="1"} 0' in text
    assert 'jaxserve:num_requests_running{model_name="tiny",engine="1"}' not in text
    assert 'jaxserve:engine_up{model_name="tiny",engine="0"} 1' in text
    assert client_of(frontend).get("/status.json").json()["groups_up"] == [True, False]
    groups[0].is_up = False
    assert 'jaxserve:group_up{model_name="tiny",engine="0"} 0' in asyncio.run(metrics_text(frontend))


def test_operators_see_the_load_of_each_group() -> None:
    groups = [FakeGroup(), FakeGroup()]
    frontend = Frontend(ServerConfig(), groups_of(*groups), "tiny")
    servicer: Any = AdminServicer(frontend, lambda timeout_s: None)
    groups[1].is_up = False
    load = asyncio.run(servicer.GetLoad(admin_pb2.GetLoadRequest(), None))
    first = admin_pb2.GroupLoad(
        is_up=True, num_running=load.num_running, num_waiting=load.num_waiting, kv_cache_usage=load.kv_cache_usage
    )
    assert list(load.groups) == [first, admin_pb2.GroupLoad()] and load.num_running > 0 and load.num_waiting > 0
    groups[1].is_up = True
    both = asyncio.run(servicer.GetLoad(admin_pb2.GetLoadRequest(), None))
    assert list(both.groups) == [first] * 2 and both.num_running == 2 * load.num_running


def test_operators_see_how_far_each_process_is() -> None:
    groups = [FakeGroup(), FakeGroup()]
    for index, group in enumerate(groups):
        labels = {"rank": str(index + 1), "host": f"node{index}"}
        progress = [Counter(f"jaxserve:group_{name}", labels, 7 + index) for name in ("steps", "sent_bytes")]
        group.answers["metrics"] = [*engine_numbers(), *progress]
    frontend = Frontend(ServerConfig(), groups_of(*groups), "tiny")
    servicer: Any = AdminServicer(frontend, lambda timeout_s: None)
    load = asyncio.run(servicer.GetLoad(admin_pb2.GetLoadRequest(), None))
    expected = [
        {"engine": index, "rank": index + 1, "host": f"node{index}", "num_steps": number, "num_sent_bytes": number}
        for index, number in enumerate((7, 8))
    ]
    assert [*load.ranks] == [admin_pb2.RankProgress(**each) for each in expected]
    assert client_of(frontend).get("/status.json").json()["ranks"] == expected


def test_a_group_that_has_ended_is_in_no_counter() -> None:
    groups = [FakeGroup(), FakeGroup()]
    groups[0].is_up = False
    found = asyncio.run(groups_of(*groups).metrics())
    assert {metric.labels["engine"] for metric in found} == {"1"} and any(isinstance(each, Counter) for each in found)
