"""Flags of the command line, made from the fields they set, so that both have the same names and meanings."""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import types
import typing
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sampling_checks import NOT_BUILT
from jaxserve.sampling_params import SamplingParams

_JSON_FIELDS = ("hf_overrides",)
_LENGTH_FIELDS = ("max_model_len",)
_NO_FLAG = {*NOT_BUILT, "seed"}  # --seed is the engine's


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ``EngineConfig``, named as vLLM names it."""
    group = parser.add_argument_group("engine")
    docs = _attribute_docs(EngineConfig)
    types_ = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model":
            group.add_argument("--model", default="demo", help=f"{docs['model']} (default: %(default)s)")
        else:
            _add_flag(group, field.name, types_[field.name], docs[field.name])


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``LLM`` that were given."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of ``SamplingParams`` that does something."""
    group = parser.add_argument_group("sampling (what is not given comes from the model's generation_config.json)")
    docs = _field_docs(SamplingParams)
    types_ = typing.get_type_hints(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        if field.name not in _NO_FLAG:
            _add_flag(group, field.name, types_[field.name], docs[field.name])


def sampling_arguments(options: argparse.Namespace) -> SamplingParams | None:
    """The sampling parameters that were given; None where none was."""
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in _NO_FLAG]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return SamplingParams(**given) if given else None


def _add_flag(group: Any, name: str, kind: Any, help_: str) -> None:
    flag = "--" + name.replace("_", "-")
    help_ = help_.replace("%", "%%")
    if _is(kind, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_)
    elif name in _JSON_FIELDS:
        group.add_argument(flag, type=_json_object, metavar="JSON", help=help_)
    elif name in _LENGTH_FIELDS:
        group.add_argument(flag, metavar="TOKENS", help=help_)
    elif name == "stop":
        group.add_argument(flag, action="append", metavar="TEXT", help=help_)
    elif name == "stop_token_ids":
        group.add_argument(flag, type=int, nargs="+", metavar="ID", help=help_)
    else:
        parse = int if _is(kind, int) else float if _is(kind, float) else str
        group.add_argument(flag, type=parse, metavar=parse.__name__.upper(), help=help_)


def _is(kind: Any, wanted: type) -> bool:
    """Whether a type is ``wanted``, or ``wanted | None``."""
    if isinstance(kind, types.UnionType):
        return any(_is(part, wanted) for part in typing.get_args(kind))
    return kind is wanted


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return found


def _attribute_docs(cls: type) -> dict[str, str]:
    """What a class's docstring says of each attribute."""
    text = (cls.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", doc) for name, doc in found}


def _field_docs(cls: type) -> dict[str, str]:
    """The strings that stand below a class's fields."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
