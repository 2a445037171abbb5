"""Drafters in speculators' format, whose config.json names the model that they draft for."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from checkpoints import is_gguf
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.models.hf_config import ConfigFields, read_config_json
from jaxserve.models.loading import find_model_directory

_METHODS: Final[Mapping[str, str]] = MappingProxyType({"eagle3": "eagle3", "peagle": "eagle3"})
"""The method of each ``speculators_model_type``."""
_SETTINGS: Final = "speculators_config"


def with_verifier(config: EngineConfig) -> EngineConfig:
    """Return the settings for the model that a drafter names, if ``config.model`` is a drafter in speculators' format.

    It drafts as many tokens as its config.json proposes, unless ``speculative_config`` names the drafter too. Settings
    for other models are returned unchanged.

    Raises:
        ConfigError: The drafter's config.json lacks the model or the number of tokens, its method is not supported, or
            ``speculative_config`` asks for another drafter.
    """
    directory = find_model_directory(
        config.model, config.revision, config.download_dir, config.hf_token, config.load_format
    )
    path = directory / "config.json"
    if is_gguf(directory) or not path.is_file():
        return config
    raw = read_config_json(path)
    if raw.get(_SETTINGS) is None:
        return config
    fields = ConfigFields(raw, str(path))
    kind = raw.get("speculators_model_type")
    if not isinstance(kind, str) or kind not in _METHODS:
        fields.note("speculators_model_type", f"expected {' or '.join(_METHODS)}, got {kind!r}")
        fields.raise_problems()
        kind = "eagle3"
    drafts: dict[str, Any] = {"method": _METHODS[kind], "model": config.model}
    verifier, given = _read_verifier(fields, config.model), config.speculative_config or {}
    if not given:
        drafts["num_speculative_tokens"] = _read_num_tokens(fields)
    fields.raise_problems()
    for key in drafts if given else ():
        if given.get(key) != drafts[key]:
            raise ConfigError(
                f"speculative_config.{key}: expected {drafts[key]!r}, got {given.get(key)!r}: the model "
                f"{config.model} is itself a drafter, for {verifier}; give {verifier} as the model to use another one"
            )
    drafts = {"revision": config.revision, **drafts, **given}
    return dataclasses.replace(config, model=verifier, revision=None, speculative_config=drafts)


def _read_verifier(fields: ConfigFields, drafter: str) -> str:
    """Return the model that a drafter names."""
    verifier = fields.nested(_SETTINGS).nested("verifier")
    name = verifier.raw.get("name_or_path")
    if isinstance(name, str) and name:
        return name
    verifier.note(
        "name_or_path",
        f"expected the directory or hub id of the model that it drafts for, got {name!r}; give that model as the model "
        f"and {drafter} as speculative_config.model",
    )
    return drafter


def _read_num_tokens(fields: ConfigFields) -> int:
    """Return the number of tokens that a drafter proposes to draft."""
    settings = fields.nested(_SETTINGS)
    methods = settings.items("proposal_methods") or ()
    found = methods[0].get("speculative_tokens") if methods and isinstance(methods[0], dict) else None
    if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
        return found
    settings.note("proposal_methods[0].speculative_tokens", f"expected an integer from 1 on, got {found!r}")
    return 1
