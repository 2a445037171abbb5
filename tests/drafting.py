"""``pytest --speculation METHOD``: the engines of all tests draft, also those of servers that tests start.

An engine with settings of its own for speculative decoding keeps them, and one that only embeds has none.
"""

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.server_child import REPOSITORY

METHODS = ("grammar", "ngram", "suffix", "draft_model", "eagle3", "mtp")
"""Any model can have all but the last: a draft model is the model itself, and a head is a random one. With ``mtp``, a
Llama has a random layer for multi-token prediction, and others do not draft."""
DEMO = REPOSITORY / "jaxserve" / "demo" / "model"
VARIABLE = "TESTS_SPECULATION"
"""The environment variable that has the method."""
SHORTCUTS = ("spec_method", "spec_model", "spec_tokens")
NUM_TOKENS = 4


def default(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--speculation`` changes of an engine's settings."""
    method, own = os.environ.get(VARIABLE), (*SHORTCUTS, "speculative_config")
    if method is None or settings.get("runner") == "pooling" or not settings.keys().isdisjoint(own):
        return {}
    model = settings["model"]
    if method == "mtp":
        path = _with_mtp(_directory(model))
        return {"model": path, "speculative_config": speculation(method, model)} if path else {}
    return {"speculative_config": speculation(method, model)}


def server(model: str) -> tuple[str, list[str]]:
    """The model of a server and flags; without ``--speculation`` the one given, and none."""
    changed = default({"model": model})
    flags = ["--speculative-config", json.dumps(changed["speculative_config"])] if changed else []
    return changed.get("model", model), [*flags, *(("--served-model-name", model) if "model" in changed else ())]


def speculation(method: str, model: str) -> dict[str, Any]:
    """The settings for a model: all drafts are verified, whatever it costs."""
    found = {"method": method, "num_speculative_tokens": NUM_TOKENS, "enable_adaptive_verification": False}
    if method == "draft_model":
        return {**found, "model": model}
    return {**found, "model": _head(model)} if method == "eagle3" else found


@functools.cache
def _head(model: str) -> str:
    """The directory of a random EAGLE-3 head for a model."""
    from tests.draft_heads import HEAD, write_eagle3  # imports what tests/conftest.py first has checked

    target = json.loads((_directory(model) / "config.json").read_text())
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, target["num_hidden_layers"] - 1]}
    sizes = {name: target[name] for name in ("vocab_size", "hidden_size")}
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-test-head-"))
    write_eagle3(directory, {**HEAD, **sizes, "draft_vocab_size": sizes["vocab_size"] // 2, "eagle_config": layers})
    return str(directory)


@functools.cache
def _with_mtp(model: Path) -> str | None:
    """The directory of a Llama with a random layer for multi-token prediction; None for other models."""
    from tests.draft_heads import write_llama_with_mtp  # imports what tests/conftest.py first has checked

    config = model / "config.json"
    if not config.is_file() or json.loads(config.read_text()).get("architectures") != ["LlamaForCausalLM"]:
        return None
    if not (model / "model.safetensors").is_file():
        return None
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-test-mtp-"))
    write_llama_with_mtp(directory, model)
    return str(directory)


def _directory(model: str) -> Path:
    return DEMO if model == "demo" else Path(model)
