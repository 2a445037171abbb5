"""What the files beside a vocabulary say: special tokens, chat templates, who adds BOS. Hugging Face's formats."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jaxserve.errors import ConfigError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Model types whose slow tokenizer class adds BOS unless told otherwise.
_BOS_MODEL_TYPES = frozenset({"llama", "mistral", "mixtral"})


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the vocabulary proper, found in the text before anything else."""

    content: str
    is_special: bool = True
    strips_left: bool = False
    """Whether white space before it goes with it."""
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json and the chat template files of a directory."""

    special_tokens: dict[str, str]
    """Name -> text, for `SPECIAL_NAMES` that the model has."""
    added_tokens: dict[int, AddedToken]
    """Those with a known id."""
    chat_templates: dict[str, str]
    """Name -> Jinja source; the usual one is called "default"."""
    adds_bos: bool
    adds_eos: bool
    has_prefix_per_part: bool = True
    """`legacy`: text after a special token is encoded as if it began the prompt."""
    more_special_tokens: tuple[str, ...] = field(default=())
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """tokenizer_config.json itself."""


def read_json(path: Path) -> Any:
    """Returns the contents of a JSON file, None when there is no file.

    Raises:
      ConfigError: The file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def read_settings(directory: Path) -> TokenizerSettings:
    """Reads what a model directory says about its tokenizer.

    Raises:
      ConfigError: A file is not JSON or holds another type than expected.
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
        raise ConfigError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return cast("dict[str, Any]", found)


def _content(token: Any) -> str:
    """Special tokens are written as strings or as objects with a "content"."""
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
    """Separate files win over tokenizer_config.json, as in transformers."""
    listed: Any = config.get("chat_template") or _mapping(directory / "chat_template.json").get("chat_template") or {}
    if isinstance(listed, str):
        listed = {"default": listed}
    elif isinstance(listed, list):
        listed = {entry["name"]: entry["template"] for entry in cast("list[dict[str, str]]", listed)}
    templates = dict(cast("dict[str, str]", listed))
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    return templates
