"""Speculative decoding that cannot be: the error names the key, and nothing has been loaded or compiled before it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, MemoryPlanError
from jaxserve.device import start as device_start
from jaxserve.device.stage import Stage
from jaxserve.engine import startup
from tests.draft_heads import HEAD, write_eagle3
from tests.random_checkpoint import DEEPSEEK, LLAMA, write_checkpoint

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "compilation_cache_dir": ""}
VOCABULARY = {"vocab_size": LLAMA["vocab_size"] + 1}
DEEP = {**LLAMA, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets, draft models and heads; most of the latter two fit no target."""
    names = ("shallow", "deep", "other vocabulary", "latents", "head", "wide head", "outside", "too many")
    found = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in names}
    write_checkpoint(found["shallow"], LLAMA, 0)
    write_checkpoint(found["deep"], DEEP, 0)
    write_checkpoint(found["other vocabulary"], {**LLAMA, **VOCABULARY}, 0)
    write_checkpoint(found["latents"], DEEPSEEK, 0)
    write_eagle3(found["head"], HEAD)
    write_eagle3(found["wide head"], {**HEAD, "hidden_size": 24})
    write_eagle3(found["outside"], HEAD, d2t=np.full(20, 40))
    write_eagle3(found["too many"], {**HEAD, **VOCABULARY})
    return found


@pytest.mark.parametrize(
    ("target", "method", "model", "message"),
    [
        ("shallow", "draft_model", "other vocabulary", r"speculative_config.model: \S+ has a vocabulary of 52 tokens"),
        ("deep", "eagle3", "too many", "vocab_size: expected the 51 tokens of the target"),
        ("deep", "eagle3", "wide head", "hidden_size: expected the 16 features of the target"),
        (
            "shallow",
            "eagle3",
            "head",
            "eagle_aux_hidden_state_layer_ids: expected different layers of the 2 of the target",
        ),
        ("deep", "eagle3", "outside", "d2t: expected different tokens of the 51 of the target, got 40 to 59"),
        ("deep", "eagle3", "shallow", r"speculative_config.model: \S+ is not an EAGLE-3 head, as it has no tensor fc"),
        ("shallow", "mtp", None, "speculative_config.method='mtp': LlamaForCausalLM has no layer for multi-token"),
        ("latents", "mtp", None, r"speculative_config.method='mtp': \S+ has no tensors of the layer for multi-token"),
    ],
)
def test_drafters_that_do_not_fit_a_model(
    target: str,
    method: str,
    model: str | None,
    message: str,
    directories: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found in the files of both."""
    named = {} if model is None else {"model": str(directories[model])}
    check_refused(message, directories[target], monkeypatch, method=method, num_speculative_tokens=2, **named)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_speculative_tokens": 0}, "speculative_config.num_speculative_tokens: expected an integer .*, got 0"),
        ({"num_speculative_tokens": -1}, "speculative_config.num_speculative_tokens: .* from 1 to 64, got -1"),
        ({"num_speculative_tokens": 65}, "speculative_config.num_speculative_tokens: .* from 1 to 64, got 65"),
        ({"num_speculative_tokens": 2.0}, "speculative_config.num_speculative_tokens: .* from 1 to 64, got 2.0"),
        ({"num_speculative_tokens": "2"}, "speculative_config.num_speculative_tokens: .* from 1 to 64, got '2'"),
        ({"method": "draft_model"}, "speculative_config.model: expected .* for method 'draft_model'"),
        ({"method": "eagle3"}, "speculative_config.model: expected .* for method 'eagle3'"),
        ({"method": "lookahead"}, "speculative_config.method: expected one of .*, got 'lookahead'"),
        ({"method": "medusa"}, "speculative_config.method: .*, got 'medusa': its heads guess trees"),
        ({"method": "mlp_speculator"}, "speculative_config.method: .*, got 'mlp_speculator': its heads guess trees"),
        ({"prompt_lookup_maximum": 3}, "got 'prompt_lookup_maximum'; did you mean prompt_lookup_max?"),
        ({"tensor_parallel_size": 2}, "got 'tensor_parallel_size': what a method runs on devices uses those of the"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min=4 must be at most prompt_lookup_max=3"),
        ({"rejection_sample_method": "block"}, "speculative_config.rejection_sample_method: .* got 'block'"),
        ({"rejection_sample_method": "typical"}, "speculative_config.rejection_sample_method: .* got 'typical'"),
        ({"speculative_token_tree": "[(0,)]"}, "got 'speculative_token_tree': drafts are chains, not trees"),
    ],
)
def test_settings_that_do_not_go(keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before the model's directory is read, which does not exist."""
    keys = {"method": "ngram", "num_speculative_tokens": 2, **keys}
    check_refused(message, Path("nowhere"), monkeypatch, **keys)


def test_a_drafter_that_does_not_fit_into_memory(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = {"method": "draft_model", "model": str(directories["deep"]), "num_speculative_tokens": 2}
    message = r"for weights \(0\.00 GiB of them of the draft model\)"
    with pytest.raises(MemoryPlanError, match=message):
        start(directories["shallow"], monkeypatch, drafter, gpu_memory_utilization=1e-6)


def check_refused(message: str, target: Path, monkeypatch: pytest.MonkeyPatch, **speculation: Any) -> None:
    """Check that an engine does not start."""
    with pytest.raises(ConfigError, match=message):
        start(target, monkeypatch, speculation)


def start(target: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], **settings: Any) -> None:
    """Start an engine, which fails once it loads or compiles anything."""
    monkeypatch.setattr(device_start, "load_params", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(Stage, "compile", lambda _: pytest.fail("a program was compiled"))
    startup.start_engine(EngineConfig(model=str(target), speculative_config=speculation, **SETTINGS, **settings))
