"""The flags of ``jaxserve serve``, and its configuration file."""

import argparse
import dataclasses
import json
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.api.errors import ConfigError
from jaxserve.api.vllm_arguments import SERVE_NO_EFFECT, SERVE_REFUSED, log_ignored
from jaxserve.cli_arguments import (
    add_dataclass_arguments,
    add_engine_arguments,
    add_vllm_arguments,
    engine_arguments,
    field_docs,
    given_arguments,
)
from jaxserve.group.settings import GroupConfig
from jaxserve.server.settings import ServerConfig

GROUP_SETTINGS = tuple(field.name for field in dataclasses.fields(GroupConfig))
"""Names of the settings of a group."""
HELP = "serve a model over OpenAI-compatible HTTP and gRPC"
_JSON_LISTS = ("allowed_origins", "allowed_methods", "allowed_headers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, a flag for each setting of the server, and those of the engine."""
    help_ = "directory, .gguf file, hub id, or demo for the model that comes with the package (default: demo)"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=help_)
    parser.add_argument("--config", metavar="FILE", help="YAML file with flags, without their dashes; flags given win")
    group = parser.add_argument_group("server")
    docs = field_docs(ServerConfig)
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    plain = [name for name in names if name not in ("served_model_name", *_JSON_LISTS)]
    add_dataclass_arguments(group, ServerConfig, plain)
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help=docs["served_model_name"])
    for name in _JSON_LISTS:
        group.add_argument("--" + name.replace("_", "-"), type=_json_list, metavar="JSON", help=docs[name])
    group = parser.add_argument_group("several processes and hosts")
    add_dataclass_arguments(group, GroupConfig, GROUP_SETTINGS)
    add_engine_arguments(parser, without=GROUP_SETTINGS)
    add_vllm_arguments(parser, {**SERVE_NO_EFFECT, **SERVE_REFUSED})


def serve_arguments(options: argparse.Namespace) -> tuple[dict[str, Any], ServerConfig, GroupConfig]:
    """The engine's arguments, and the settings of the server and of its group, that were given.

    Raises:
        ConfigError: A setting that is wrong.
    """
    given = {name: value for name, value in engine_arguments(options).items() if name not in GROUP_SETTINGS}
    if options.model_tag is not None:
        given["model"] = options.model_tag
    names = [field.name for field in dataclasses.fields(ServerConfig)]
    settings = given_arguments(options, names)
    log_ignored(given_arguments(options, (*SERVE_NO_EFFECT, *SERVE_REFUSED)), SERVE_NO_EFFECT, SERVE_REFUSED, ())
    config = ServerConfig.from_arguments(settings, os.environ)
    config.check_engine(given)
    return given, config, GroupConfig.from_arguments(given_arguments(options, GROUP_SETTINGS), config.insecure)


def with_config_file(arguments: Sequence[str]) -> list[str]:
    """Return a command line's arguments after those of its ``--config`` file, so that flags on the command line win.

    Raises:
        ConfigError: The file is unreadable, is not a mapping, or sets an unknown flag.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(list(arguments))[0].config
    if path is None:
        return list(arguments)
    try:
        found = yaml.safe_load(Path(path).read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        # The error of a YAML parser quotes the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ConfigError(f"config: {path} cannot be read as YAML: {type(error).__name__}{where}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"config: expected a mapping of flags in {path}, got {type(found).__name__}")
    flags = dict(typing.cast("dict[str, Any]", found))
    model = flags.pop("model", None)
    known = _known_flags()
    written = [part for name, value in flags.items() for part in _as_flag(known, str(name), value)]
    # A flag stands last, so that one with several values takes none of what follows.
    return [*written, f"--config={path}" if model is None else f"--model={model}", *arguments]


def _known_flags() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    parser.add_argument("--quiet", action="store_true")  # as every command has it
    return parser._option_string_actions


def _as_flag(known: dict[str, argparse.Action], name: str, value: Any) -> list[str]:
    """A setting of the file as words of a command line: each value in one word with its flag, so that it stays there.

    Raises:
        ConfigError: There is no such flag, or it takes no such value. A value that may be a key is not shown.
    """
    flag, dot, keys = ("--" + name).partition(".")
    flag = flag.replace("_", "-")
    action = known.get(flag)
    if action is None or (dot and action.metavar != "JSON"):
        raise ConfigError(f"config: there is no flag --{name}")
    if dot:
        return [f"{flag}.{keys}={json.dumps(value)}"]
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"config: {name}: expected true or false, got {value!r}")
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, bool):
        raise ConfigError(f"config: {name}: expected a value, got true or false; a text needs quotes")
    if isinstance(value, dict) or (isinstance(value, list) and action.metavar == "JSON"):
        return [f"{flag}={json.dumps(value)}"]
    values = value if isinstance(value, list) else [value]
    if action.nargs == "+" and len(values) > 1:
        return [flag, *map(str, values)]
    return [f"{flag}={one}" for one in values]


def _json_list(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON list of texts, got {text!r} ({error})") from error
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise argparse.ArgumentTypeError(f"expected a JSON list of texts, got {text!r}")
    return found
