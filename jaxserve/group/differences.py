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
NONE = "none"
"""Value of what only another process has."""


def common_settings(config: EngineConfig) -> dict[str, str]:
    """Return the settings that may not differ."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OWN_SETTINGS]
    return {f"setting {name}": repr(getattr(config, name)) for name in names}


def least(facts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the least of each number that may differ between hosts."""
    return {name: min(each[name] for each in facts) for name in _LEAST if name in facts[0]}


def difference(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    """Return the first difference between the facts of process 0 and another one, in words; None if there is none.

    What only one of them says comes last: it may follow from another difference.

    Args:
        facts: What each process is about to run, in the order of ranks.
        names: What to call each process.
    """
    first = facts[0]
    for rank, other in enumerate(facts):
        for name in sorted(dict.fromkeys((*first, *other)), key=lambda name: name not in first or name not in other):
            mine, theirs = first.get(name, NONE), other.get(name, NONE)
            if name not in _LEAST and mine != theirs:
                return in_words(names[rank], names[0], name, theirs, mine)
    return None


def in_words(one: str, first: str, name: str, theirs: object, mine: object) -> str:
    """Return in words how a process, ``one``, differs from process 0, ``first``."""
    return f"{one} differs from {first} in {name}: {theirs} instead of {mine}"
