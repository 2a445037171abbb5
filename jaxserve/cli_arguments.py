"""Command-line flags, generated from the fields that they set, so that names and meanings agree."""

import argparse
import ast
import collections.abc
import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.vllm_arguments import OTHER_NAMES, Argument
from jaxserve.api.vllm_engine_arguments import NO_EFFECT, REFUSED

_LENGTH_FIELDS = ("max_model_len",)
_COUNT_FIELDS = ("stage_layers",)
_NO_FLAG = {"seed", "output_kind"}  # --seed sets the engine's; output_kind is the command's choice
_Part = tuple[Sequence[str], Any]
_PARTS_HELP = "Flags that take a JSON object also accept single keys: --hf-overrides.rope_theta 1e6"


class FlagParser(argparse.ArgumentParser):
    """A parser whose flags for JSON objects also accept single keys, as in vLLM.

    ``--flag.name.inner VALUE`` is ``--flag '{"name": {"inner": VALUE}}'``; the value is JSON, or a string if it is not
    valid JSON. ``--flag.name+ a,b`` appends strings to a list. Single keys and whole objects are merged; later ones
    win.
    """

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  (theirs is overloaded)
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse arguments as ``argparse`` does, after merging keys of objects; a command refuses unknown arguments."""
        found, unknown = super().parse_known_args(self._with_wholes(sys.argv[1:] if args is None else args), namespace)
        if unknown and self._subparsers is None:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            self.error(f"unknown argument {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or an error; ``argparse`` would ignore that it cannot be written."""
        if message:
            (sys.stderr if file is None else file).write(message)

    def _with_wholes(self, arguments: Iterable[str]) -> list[str]:
        """Return the arguments with each key of an object replaced by the whole object so far; the last one counts."""
        given = collections.defaultdict[str, list[_Part]](list)
        found, left = list[str](), iter(arguments)
        for argument in left:
            written, _, value = argument.partition("=")
            flag, *keys = written.split(".")
            action = self._option_string_actions.get(flag)
            if argument == "--":
                return [*found, argument, *left]
            if action is None or action.type not in (_json_object, _json_object_or_text):
                found.append(argument)
                continue
            value = value if "=" in argument else next(left, None)
            if value is None or not all(key.removesuffix("+") for key in keys):
                self.error(f"argument {written}: expected {flag}.NAME VALUE or {flag} JSON")
            found.append(f"{flag}={_noted(given[flag], keys, value)}")
        return found


class _More(list[str]):
    """Strings to append to a list."""


def _noted(given: list[_Part], keys: Sequence[str], text: str) -> str:
    """Add one occurrence of a flag; return the merged object as JSON, or the text itself if it is not an object.

    Args:
        given: Earlier occurrences: keys that lead to a value (none for the whole object), and the value.
        keys: The keys of this occurrence.
        text: The value.
    """
    if keys and keys[-1].endswith("+"):
        given.append(([*keys[:-1], keys[-1][:-1]], _More(text.split(","))))
    elif keys:
        given.append((keys, _json_or_text(text)))
    else:
        try:
            whole = _json_object(text)
        except argparse.ArgumentTypeError:
            return text
        given[:] = [*(part for part in given if part[0]), ((), whole)]
    made: Any = {}
    for names, value in given:
        made = _merged(made, names, value)
    return json.dumps(made)


def _merged(old: Any, keys: Sequence[str], value: Any) -> Any:
    """Return ``old`` with a value merged in under nested keys."""
    if keys:
        around = old if isinstance(old, dict) else {}
        return {**around, keys[0]: _merged(around.get(keys[0]), keys[1:], value)}
    if isinstance(value, _More):
        return [*(old if isinstance(old, list) else ()), *value]
    if isinstance(old, dict) and isinstance(value, dict):
        return {**old, **{key: _merged(old.get(key), (), inner) for key, inner in value.items()}}
    return value


def _json_object_or_text(text: str) -> Any:
    return _json_or_text(text)


def _json_or_text(text: str) -> Any:
    if text == "None":  # as vLLM's command line has null
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_engine_arguments(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each field of ``EngineConfig``, with vLLM's name, and for vLLM's others but those ``without``."""
    group = parser.add_argument_group("engine", _PARTS_HELP)
    group.add_argument("--model", default="demo", help=f"{field_docs(EngineConfig)['model']} (default: %(default)s)")
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    add_dataclass_arguments(group, EngineConfig, names)
    others = {name: argument for name, argument in {**NO_EFFECT, **REFUSED}.items() if name not in without}
    add_vllm_arguments(parser, others)


def add_vllm_arguments(parser: argparse.ArgumentParser, arguments: Mapping[str, Argument]) -> None:
    """Add flags of vLLM that are no settings here; the help leaves them out, PARAMETERS.md lists them."""
    for name, argument in arguments.items():
        flags = ("--" + name.replace("_", "-"), *OTHER_NAMES.get(name, ()))
        add = functools.partial(parser.add_argument, *flags, dest=name, help=argparse.SUPPRESS)
        if isinstance(argument.default, bool):
            add(action=argparse.BooleanOptionalAction, default=None)
        elif isinstance(argument.default, tuple):
            add(type=_json_or_text, nargs="*")
        elif isinstance(argument.default, dict):
            add(type=_json_object_or_text)
        else:
            add(type=_json_or_text)


def given_arguments(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named options that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


def add_dataclass_arguments(group: Any, cls: type, names: Iterable[str]) -> None:
    """Add a flag for each named field of a dataclass, with the field's documentation as help."""
    docs, types_ = field_docs(cls), typing.get_type_hints(cls)
    for name in names:
        _add_flag(group, name, types_[name], docs[name])


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that were given, with vLLM's that are no settings."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return given_arguments(options, (*names, *NO_EFFECT, *REFUSED))


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of ``SamplingParams`` except the seed, which is the engine's."""
    group = parser.add_argument_group("sampling (defaults come from the model's generation_config.json)")
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in _NO_FLAG]
    add_dataclass_arguments(group, SamplingParams, names)


def sampling_arguments(options: argparse.Namespace) -> SamplingParams | None:
    """Return the sampling parameters that were given; None if there were none."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in _NO_FLAG]
    given = given_arguments(options, names)
    return SamplingParams(**given) if given else None


def _add_flag(group: Any, name: str, kind: Any, help_: str) -> None:
    """Add a flag for a field of type ``kind``, for the first of its types that a flag supports, in the order below."""
    flags = ("--" + name.replace("_", "-"), *OTHER_NAMES.get(name, ()))
    add = functools.partial(group.add_argument, *flags, help=help_.replace("%", "%%"))
    kinds = _alternatives(kind)
    literals = [value for one in kinds if typing.get_origin(one) is typing.Literal for value in typing.get_args(one)]
    if name in _LENGTH_FIELDS:
        add(metavar="TOKENS")
    elif name in _COUNT_FIELDS:
        add(type=_integers, metavar="N,N,...")
    elif bool in kinds:
        add(action=argparse.BooleanOptionalAction, default=None)
    elif literals:
        add(type=type(literals[0]), choices=literals)
    elif any(_is_object(one) for one in kinds):
        add(type=_json_object, metavar="JSON")
    elif any(_is_list(one, int) for one in kinds):
        add(type=int, nargs="+", metavar="ID")
    elif any(_is_list(one, str) for one in kinds):
        add(action="append", metavar="TEXT")
    else:
        parse = int if int in kinds else float if float in kinds else str
        add(type=parse, metavar=parse.__name__.upper())


def _alternatives(kind: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return list(typing.get_args(kind)) if is_union else [kind]


def _is_object(kind: Any) -> bool:
    """Return whether values of this type are written as JSON objects."""
    return typing.get_origin(kind) in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(kind)


def _is_list(kind: Any, item: type) -> bool:
    """Return whether values of this type are lists of ``item``; items of type Any are strings."""
    is_list = typing.get_origin(kind) in (list, tuple, collections.abc.Sequence)
    return is_list and (item in typing.get_args(kind) or (item is str and Any in typing.get_args(kind)))


def _integers(text: str) -> list[int]:
    """Return the numbers of a text such as ``10,11,11``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected integers such as 10,11,11, got {text!r}") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def field_docs(cls: type) -> dict[str, str]:
    """Return the documentation of each field of a dataclass, on one line, from below the field or from
    ``Attributes:``."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]  # Python 3.13 already strips the indent
    found = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE))
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = ast.literal_eval(below.value)
    return {name: re.sub(r"\s+", " ", doc).strip() for name, doc in found.items()}
