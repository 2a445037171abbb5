"""The proposers of draft tokens, by their method of ``speculative_config``."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.api.speculation import DEVICE_METHODS
from jaxserve.scheduling.proposers.grammar import GrammarProposer
from jaxserve.scheduling.proposers.ngram import NgramProposer
from jaxserve.scheduling.proposers.on_device import DeviceProposer
from jaxserve.scheduling.proposers.proposer import DraftProposer
from jaxserve.scheduling.proposers.suffix import SuffixProposer
from jaxserve.scheduling.proposers.token_index import find_library

PROPOSERS: Mapping[str, Callable[[Mapping[str, Any]], DraftProposer]] = MappingProxyType(
    {
        "grammar": GrammarProposer,
        "ngram": NgramProposer,
        "suffix": lambda config: SuffixProposer(config, find_library()),
        **dict.fromkeys(DEVICE_METHODS, lambda _: DeviceProposer()),
    }
)
"""The proposer of each method, made from the checked settings."""


def make_proposer(config: Mapping[str, Any] | None) -> DraftProposer | None:
    """Return a proposer for a checked ``speculative_config``; None without one."""
    return None if config is None else PROPOSERS[config["method"]](config)
