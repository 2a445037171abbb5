"""Read a tokenizer's configuration files in Hugging Face's formats: special tokens, chat templates, BOS and EOS."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jaxserve.api.errors import ConfigError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Model types whose slow tokenizer class adds BOS by default.
_BOS_MODEL_TYPES = frozenset({"llama", "mistral", "mixtral"})


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the base vocabulary, split off the text before anything else."""

    content: str
    is_special: bool = True
    strips_left: bool = False
    """Whether it strips white space before it."""
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat template files of a directory."""

    special_tokens: dict[str, str]
    """Texts by name, for those of `SPECIAL_NAMES` that the model has."""
    added_tokens: dict[int, AddedToken]
    """Added tokens by id."""
    chat_templates: dict[str, str]
    """Jinja sources by name, such as "default"."""
    adds_bos: bool
    adds_eos: bool
    has_prefix_per_part: bool = True
    """`legacy`: whether text after a special token is encoded like the start of a prompt."""
    more_special_tokens: tuple[str, ...] = field(default=())
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Contents of tokenizer_config.json."""


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file; None if the file does not exist.

    Raises:
      ConfigError: The file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the tokenizer's configuration files in a model directory.

    Raises:
      ConfigError: A file cannot be read, is not JSON, or has a value of the wrong type.
    """
    config = _mapping(directory / "tokenizer_config.json")
    named = {**_mapping(directory / "special_tokens_map.json"), **config}
    special = {name: _content(named[name]) for name in SPECIAL_NAMES if named.get(name)}
    model_type = _mapping(directory / "config.json").get("model_type")
    class_adds_bos = str(config.get("tokenizer_class", "")).startswith("Llama") or model_type in _BOS_MODEL_TYPES
    more: Any = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    values: list[Any] = list(more.values() if isinstance(more, dict) else more)
    return TokenizerSettings(
        special_tokens=special,
        added_tokens=_added_tokens(directory, config),
        chat_templates=_chat_templates(directory, config),
        adds_bos=bool(config.get("add_bos_token", class_adds_bos)),
        adds_eos=bool(config.get("add_eos_token", False)),
        has_prefix_per_part=config.get("legacy") is not False,
        more_special_tokens=tuple(_content(value) for value in values),
        config=config,
    )


def _mapping(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a JSON object, got {type(found).__name__}")
    return cast("dict[str, Any]", found)


def _content(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with "content"."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str):
        raise ConfigError(f"a special token must be a string or an object with 'content', got {token!r}")
    return content


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    added = {int(token_id): AddedToken(text) for text, token_id in _mapping(directory / "added_tokens.json").items()}
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        added[int(token_id)] = AddedToken(
            _content(entry), bool(entry.get("special")), bool(entry.get("lstrip")), bool(entry.get("rstrip"))
        )
    return added


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read chat templates; separate files take precedence over tokenizer_config.json, as in transformers."""
    listed: Any = config.get("chat_template") or _mapping(directory / "chat_template.json").get("chat_template") or {}
    if isinstance(listed, str):
        listed = {"default": listed}
    elif isinstance(listed, list):
        listed = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", listed)}
    templates = dict(cast("dict[str, str]", listed))
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8-sig")
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8-sig")
    return templates
