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
_MAX_TOKEN_ID = 2**31 - 1
_NO_TEMPLATES = (None, "", [], {})
_MAX_SHOWN = 80  # characters of a wrong value in a message


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


def wrong_value(path: Path, key: str, expected: str, value: Any) -> ConfigError:
    """Return the error of a value in a file, which names file and key."""
    return ConfigError(f"{path}: {key}: expected {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class JsonFile:
    """A JSON object in a file, which may be missing, with access to values of the right type.

    Raises:
      ConfigError: From each method: a value has another type. null and a missing value count as none.
    """

    path: Path
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "JsonFile":
        """Read a file; one that does not exist has no values."""
        found = read_json(path)
        if found is not None and not isinstance(found, dict):
            raise ConfigError(f"{path} must be a JSON object, got {type(found).__name__}")
        return cls(path, cast("dict[str, Any]", found or {}))

    def text(self, key: str) -> str | None:
        """Return a string."""
        value = self.values.get(key)
        return None if value is None else check_text(self.path, key, value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; false for null."""
        value = self.values.get(key, default)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise wrong_value(self.path, key, "true or false", value)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object; an empty one for none."""
        value = self.values.get(key)
        if value is None or isinstance(value, dict):
            return cast("dict[str, Any]", value or {})
        raise wrong_value(self.path, key, "an object", value)


def check_text(path: Path, key: str, value: Any) -> str:
    """Return a string of a file that UTF-8 can encode.

    Raises:
      ConfigError: It is another value.
    """
    if not isinstance(value, str):
        raise wrong_value(path, key, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong_value(path, key, "a string of valid Unicode", value) from None
    return value


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file; None if the file does not exist.

    Raises:
      ConfigError: The file cannot be read, is not JSON or nests too deep.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def read_settings(directory: Path) -> TokenizerSettings:
    """Read the tokenizer's configuration files in a model directory.

    Raises:
      ConfigError: A file cannot be read, is not JSON, or has a value of the wrong type.
    """
    config = JsonFile.read(directory / "tokenizer_config.json")
    others = JsonFile.read(directory / "special_tokens_map.json")
    model_type = JsonFile.read(directory / "config.json").text("model_type")
    class_adds_bos = (config.text("tokenizer_class") or "").startswith("Llama") or model_type in _BOS_MODEL_TYPES
    return TokenizerSettings(
        special_tokens=_special_tokens(config, others),
        added_tokens=_added_tokens(directory, config),
        chat_templates=_chat_templates(directory, config),
        adds_bos=config.flag("add_bos_token", class_adds_bos),
        adds_eos=config.flag("add_eos_token", False),
        has_prefix_per_part=config.values.get("legacy") is None or config.flag("legacy", True),
        more_special_tokens=_more_special_tokens(config, others),
        config=config.values,
    )


def _special_tokens(config: JsonFile, others: JsonFile) -> dict[str, str]:
    """Return the texts of special tokens by name; those of tokenizer_config.json take precedence."""
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        file = config if name in config.values else others
        value = file.values.get(name)
        if value not in (None, ""):
            found[name] = _content(file.path, name, value)
    return found


def _more_special_tokens(config: JsonFile, others: JsonFile) -> tuple[str, ...]:
    for key in ("extra_special_tokens", "additional_special_tokens"):
        file = config if key in config.values else others
        value = file.values.get(key)
        if not isinstance(value, list | dict | None):
            raise wrong_value(file.path, key, "a list or an object of special tokens", value)
        if value:
            tokens = cast("list[Any]", list(value.values()) if isinstance(value, dict) else value)
            return tuple(_content(file.path, f"{key}[{index}]", token) for index, token in enumerate(tokens))
    return ()


def _content(path: Path, key: str, token: Any) -> str:
    """Return the text of a special token, which is a string or an object with "content"."""
    if isinstance(token, str):
        return check_text(path, key, token)
    content: Any = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else None
    if not isinstance(content, str):
        raise ConfigError(
            f"{path}: {key}: a special token must be a string or an object with 'content', got {_shown(token)}"
        )
    return check_text(path, f"{key}.content", content)


def _added_tokens(directory: Path, config: JsonFile) -> dict[int, AddedToken]:
    listed = JsonFile.read(directory / "added_tokens.json")
    added: dict[int, AddedToken] = {}
    for text, token_id in listed.values.items():
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise wrong_value(listed.path, text, "a token id", token_id)
        added[token_id] = AddedToken(check_text(listed.path, "a token", text))
    for token_id, entry in config.mapping("added_tokens_decoder").items():
        key = f"added_tokens_decoder.{token_id}"
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= len(str(_MAX_TOKEN_ID))):
            raise wrong_value(config.path, "added_tokens_decoder", "token ids as names", token_id)
        if not isinstance(entry, dict):
            raise wrong_value(config.path, key, "an object with 'content'", entry)
        token = JsonFile(config.path, cast("dict[str, Any]", entry))
        flags = (token.flag(name, False) for name in ("special", "lstrip", "rstrip"))
        added[int(token_id)] = AddedToken(_content(config.path, key, entry), *flags)
    return added


def _chat_templates(directory: Path, config: JsonFile) -> dict[str, str]:
    """Read chat templates; separate files take precedence over tokenizer_config.json, as in transformers."""
    is_missing = config.values.get("chat_template") in _NO_TEMPLATES
    file = JsonFile.read(directory / "chat_template.json") if is_missing else config
    templates = _listed_templates(file.path, file.values.get("chat_template"))
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path)
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = _read_template(single)
    return templates


def _listed_templates(path: Path, listed: Any) -> dict[str, str]:
    """Return the templates in the field "chat_template" by name: one string, or several with names."""
    key = "chat_template"
    if listed is None or isinstance(listed, str):
        return {"default": check_text(path, key, listed)} if listed else {}
    if isinstance(listed, dict):
        named = [*cast("dict[str, Any]", listed).items()]
    elif isinstance(listed, list):
        entries = cast("list[Any]", listed)
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict) or not {"name", "template"} <= set(cast("dict[str, Any]", entry)):
                raise wrong_value(path, f"{key}[{index}]", "an object with 'name' and 'template'", entry)
        named = [(entry["name"], entry["template"]) for entry in entries]
    else:
        raise wrong_value(path, key, "a template, or a list of objects with 'name' and 'template'", listed)
    return {check_text(path, f"{key}.name", name): check_text(path, f"{key}.{name}", text) for name, text in named}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a chat template in UTF-8: {error}") from error
