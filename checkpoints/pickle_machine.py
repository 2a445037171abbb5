"""Interprets a pickle as data, without importing, calling or building anything.

`pickletools.genops` splits the stream into opcodes; this interpreter gives each its meaning for numbers, strings and
containers. Three functions passed to it interpret globals, persistent ids and calls; opcodes that only build objects
are rejected.
"""

import pickletools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_LITERALS = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 "
    "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 FLOAT BINFLOAT".split()
)
_CONSTANTS: Mapping[str, Any] = MappingProxyType({"NONE": None, "NEWTRUE": True, "NEWFALSE": False})
_TUPLES: Mapping[str, int] = MappingProxyType({"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_SKIPPED = frozenset({"PROTO", "FRAME"})


class PickleError(ValueError):
    """The pickle is damaged, or uses an opcode that plain data does not need."""


class Interpretation(NamedTuple):
    """Functions that interpret the globals, persistent ids and calls of a pickle; each may raise.

    Attributes:
        find: Return a value for a global, from its module and name.
        load: Return a value for a persistent id.
        call: Return a value for a call, from the value of its global and the tuple of arguments.
    """

    find: Callable[[str, str], Any]
    load: Callable[[Any], Any]
    call: Callable[[Any, tuple[Any, ...]], Any]


class PickleMachine:
    """Interprets one pickle.

    Args:
        interpretation: how globals, persistent ids and calls are interpreted.
    """

    def __init__(self, interpretation: Interpretation) -> None:
        self._meaning = interpretation
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._actions: Mapping[str, Callable[[], None]] = {
            "MARK": self._mark,
            "POP": self._pop,
            "POP_MARK": self._pop_to_mark,
            "DUP": self._duplicate,
            "MEMOIZE": self._memoize,
            "TUPLE": self._tuple,
            "EMPTY_LIST": self._empty_list,
            "LIST": self._list,
            "APPEND": self._append,
            "APPENDS": self._appends,
            "EMPTY_DICT": self._empty_dict,
            "DICT": self._dict,
            "SETITEM": self._set_item,
            "SETITEMS": self._set_items,
            "STACK_GLOBAL": self._stack_global,
            "BINPERSID": self._persistent,
            "REDUCE": self._reduce,
            "BUILD": self._build,
        }

    def run(self, pickled: bytes) -> Any:
        """Return the value that the pickle describes.

        Args:
            pickled: a pickle of any protocol.

        Raises:
            PickleError: damaged, or an opcode that plain data does not need.
        """
        try:
            with warnings.catch_warnings():
                # A damaged name can contain what Python parses as an invalid escape sequence.
                warnings.simplefilter("ignore", DeprecationWarning)
                for opcode, argument, _ in pickletools.genops(pickled):
                    if opcode.name == "STOP":
                        return self._stack.pop()
                    self._step(opcode.name, argument)
        except PickleError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError) as error:
            raise PickleError(f"the pickle is damaged: {error!r}") from error
        raise PickleError("the pickle is damaged: no STOP opcode")

    def _step(self, opcode: str, argument: Any) -> None:
        if opcode in self._actions:
            self._actions[opcode]()
        elif opcode in _LITERALS:
            self._stack.append(argument)
        elif opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode])
        elif opcode in _PUTS:
            self._memo[argument] = self._stack[-1]
        elif opcode in _GETS:
            self._stack.append(self._memo[argument])
        elif opcode in _TUPLES:
            self._pack(_TUPLES[opcode])
        elif opcode in ("GLOBAL", "INST"):
            module, _, name = argument.partition(" ")
            self._find(module, name)
            if opcode == "INST":
                raise PickleError("pickle uses INST, which no tensor file needs")
        elif opcode not in _SKIPPED:
            raise PickleError(f"pickle uses {opcode}, which no tensor file needs")

    # stack and memo

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _pop_to_mark(self) -> None:
        self._pop_mark()

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    # containers

    def _tuple(self) -> None:
        items = self._pop_mark()
        self._stack.append(tuple(items))

    def _pack(self, count: int) -> None:
        items = [self._stack.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _empty_list(self) -> None:
        self._stack.append([])

    def _list(self) -> None:
        items = self._pop_mark()
        self._stack.append(items)

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        items = self._pop_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        checked(self._stack[-1], list).extend(items)

    def _empty_dict(self) -> None:
        self._stack.append({})

    def _dict(self) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._update(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        items = self._pop_mark()
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = checked(self._stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Plain keys only: hashing a tuple nested over itself takes exponential time.
            if not isinstance(key, str | int):
                raise PickleError(f"the pickle is damaged: a dictionary key of type {type(key).__name__}")
            target[key] = value

    # names, persistent ids, calls

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(checked(module, str), checked(name, str))

    def _find(self, module: str, name: str) -> None:
        self._stack.append(self._meaning.find(module, name))

    def _persistent(self) -> None:
        self._stack.append(self._meaning.load(self._stack.pop()))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._meaning.call(function, checked(arguments, tuple)))

    def _build(self) -> None:
        """Ignore attributes of a dictionary: torch stores module versions there."""
        self._stack.pop()
        checked(self._stack[-1], dict)


def checked(value: Any, kind: type) -> Any:
    """Return the value after checking its type.

    Args:
        value: anything from a pickle.
        kind: the expected type.

    Raises:
        PickleError: it is of another type.
    """
    if not isinstance(value, kind):
        raise PickleError(f"the pickle is damaged: expected a {kind.__name__}, got a {type(value).__name__}")
    return value
