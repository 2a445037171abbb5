"""Settings that all processes must have in common, and how processes differ; without JAX, for front ends too."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.config import EngineConfig

_OWN_SETTINGS = frozenset(
    "model tokenizer download_dir hf_token compilation_cache_dir compilation_cache_max_bytes chat_template "
    "disable_log_stats num_threads".split()
)
"""Settings that may differ: where files are on each host, and what only one process does."""
_LEAST = ("num_pages", "max_model_len")


def common_settings(config: EngineConfig) -> dict[str, str]:
    """Return the settings that may not differ."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN_SETTINGS]
    return {f"setting {name}": repr(getattr(config, name)) for name in names}


def least(facts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the least of each number that may differ between hosts."""
    return {name: min(each[name] for each in facts) for name in _LEAST if name in facts[0]}


def difference(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Return the first difference between the facts of process 0 and another one, in words; None if there is none.

    Args:
        facts: What each process is about to run, in the order of ranks.
        names: What to call each process.
    """
    first = facts[0]
    for rank, other in enumerate(facts):
        for name in dict.fromkeys((*first, *other)):
            mine, theirs = first.get(name, "none"), other.get(name, "none")
            if name not in _LEAST and mine != theirs:
                return f"{names[rank]} differs from {names[0]} in {name}: {theirs} instead of {mine}"
    return None
