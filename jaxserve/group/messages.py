"""Messages between the leader of a group, process 0, and its followers, the others; and those of nodes."""

from dataclasses import dataclass, field
from typing import Any

from jaxserve.frames import Codec, dataclass_form

MAX_HELLO_BYTES = 4096
"""Longest frame of a process that has not shown that it has the secret."""
MAX_BYTES = 256 << 20
"""Longest frame: the plans of a step."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The leader's first message: random bytes that the follower signs."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """The follower's first message."""

    rank: int
    count: int
    """Number of processes that it expects."""
    host: str
    """Its machine's name, for messages."""
    machine: str
    """Names its machine; processes with the same one share its memory."""
    pid: int
    nonce: bytes
    proof: bytes
    """The leader's nonce and these fields, signed with the secret."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The leader has the secret too, and the rank is free."""

    proof: bytes
    """The follower's nonce, signed with the secret."""


@dataclass(frozen=True, slots=True)
class Joined:
    """All processes have joined."""

    num_on_host: int
    """Those on the machine of the receiver."""
    moved: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings that the engine had moved to before it was started again, in place of those of the command."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process is about to run, by name; all must have the same."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Agreed:
    """All have the same facts. Numbers that may differ between hosts get these values."""

    values: dict[str, int]


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process waits for others: those that it exchanges stages' arrays with, or passes messages on to."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where each process waits, in the order of ranks."""

    hosts: list[str]
    ports: list[int]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of an array that one pipeline stage hands over to another, sent from process to process."""

    epoch: int
    """Number of resets before it."""
    channel: int
    """Which stages hand it over."""
    is_last: bool
    """Whether it is the last one of a step."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Ready:
    """The follower is compiled and loaded."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run every program of a data slice once."""

    replica: int = 0
    """Index of the data slice."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch a step."""

    number: int
    """Number of the step, from 0."""
    plans: bytes
    """The plans of its lanes; see ``plan_codec``."""
    replica: int = 0
    """Index of the data slice that runs it."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Drop the steps in flight of a data slice, and forget its slots and pages."""

    replica: int = 0
    """Index of the data slice."""


@dataclass(frozen=True, slots=True)
class Done:
    """The follower has finished a step."""

    number: int
    digest: bytes
    """Eight bytes that depend on the plans and the tokens of all steps so far."""


@dataclass(frozen=True, slots=True)
class Results:
    """What a step gave in stages that the leader has no part of."""

    number: int
    data: bytes
    """See ``encode_results``."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Plan and compile a change of mesh or layout while steps go on."""

    number: int
    """Number of the move."""
    changes: dict[str, Any]
    """The settings that change."""


@dataclass(frozen=True, slots=True)
class MoveFacts:
    """What the follower is about to move to, as ``Facts``, and where it waits for the others."""

    number: int
    values: dict[str, Any]
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class MoveAgreed:
    """All are about to move to the same; as ``Agreed`` and ``Addresses``."""

    number: int
    values: dict[str, int]
    hosts: list[str]
    ports: list[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The follower is connected to the others, and has compiled."""

    number: int
    error: str
    """Why it cannot move; empty: it can."""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The move is given up."""

    number: int


@dataclass(frozen=True, slots=True)
class Move:
    """Move all that the devices hold. No step is in flight."""

    number: int
    pages: list[list[int]]
    """The cached pages of each scheduler that are kept."""
    states: list[list[int]]
    """The state pages likewise."""


@dataclass(frozen=True, slots=True)
class Write:
    """Write the cached pages and states that were kept: each a ``PageMove`` or ``StateMove``, by new scheduler."""

    moves: list[list[list[int]]]
    state_moves: list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class Moved:
    """The follower has moved."""

    number: int


@dataclass(frozen=True, slots=True)
class Settle:
    """All have moved."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The sender is alive. Sent every second by both."""


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Log the stacks of all Python threads, and answer with ``Stacks``."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The answer to ``ShowStacks``."""

    number: int
    """The latest step that was launched; -1: none."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The follower has failed; its last message."""

    error: str
    is_setting: bool
    """Whether a setting or a file is wrong."""
    traceback: str


@dataclass(frozen=True, slots=True)
class End:
    """End the process; the leader's last message."""

    reason: str
    """Why the group failed; empty: it did not."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Start the engine process of a group on another node, and pass on what it and the front end send each other."""

    nonce: bytes
    """From it and the secret comes the secret of the group's own connections."""


@dataclass(frozen=True, slots=True)
class Leading:
    """The answer to ``Lead``."""

    host: str
    """Where process 0 of the group will listen, if it has others."""
    port: int
    clock_s: float
    """``time.monotonic()`` of the node."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Start a process of a group that is not its process 0, which listens at this address; see ``Lead``."""

    host: str
    port: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes that a front end and the engine process of another node send each other."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process that the node has started."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The process that the node has started has ended; its exit status as ``subprocess`` has it."""

    status: int


AboutMoves = Prepare | MoveAgreed | Dismiss | Move | Write | Settle
ToNode = Lead | Follow | Piece | Signal
ToAll = Challenge | Welcome | Joined | Agreed | Addresses | WarmUp | Launch | Reset | Beat | ShowStacks | End
ToFollower = ToAll | AboutMoves | ToNode
OfMoves = MoveFacts | Prepared | Moved
OfNode = Leading | Piece | Ended
ToLeader = Hello | Facts | Listening | Ready | Done | Results | Beat | Stacks | Failed | OfMoves | OfNode

CODEC = Codec(
    {
        cls: dataclass_form(cls)
        for cls in (
            *(Challenge, Hello, Welcome, Joined, Facts, Agreed, Ready, WarmUp, Launch, Reset, Done),
            *(Beat, ShowStacks, Stacks, Failed, End, Listening, Addresses, Shard, Results),
            *(Prepare, MoveFacts, MoveAgreed, Prepared, Dismiss, Move, Write, Moved, Settle),
            *(Lead, Leading, Follow, Piece, Signal, Ended),
        )
    }
)
