"""What process 0 makes of the answers of followers about a move."""

import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, EngineDeadError
from jaxserve.group import moving
from jaxserve.group.messages import Moved, MoveFacts, Prepared
from sharding import get_layout


def member(*answers: Any) -> Any:
    """A follower that has sent these."""
    moves = queue.SimpleQueue[object]()
    for each in answers:
        moves.put(each)
    return SimpleNamespace(name="rank 1 (host b)", moves=moves)


def test_answers_about_moves_that_were_given_up_are_ignored() -> None:
    late = (Prepared(1, ""), MoveFacts(1, {}, "b", 1), Prepared(1, "too late"))
    assert moving._answer(member(*late, Moved(2)), Moved, 2) == Moved(2)


def test_what_a_follower_cannot_do_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 \(host b\): too little memory"):
        moving._answer(member(Prepared(2, "too little memory")), MoveFacts, 2)
    with pytest.raises(EngineDeadError, match="it has ended"):
        moving._answer(member(EngineDeadError("it has ended")), Moved, 2)


def test_a_layout_that_followers_cannot_import_is_refused() -> None:
    leader = cast("Any", SimpleNamespace(place=SimpleNamespace(count=2)))
    with pytest.raises(ConfigError, match="by its name, got an object of ShardingLayout"):
        layout = get_layout("tensor_parallel")
        moving.prepare_group_move(leader, cast("Any", None), EngineConfig(model="demo"), {"layout": layout})
