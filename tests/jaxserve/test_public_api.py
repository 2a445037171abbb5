"""What users import, and what importing it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve

EXPORTED = {
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "FlatLogprobs",
    "JaxserveError",
    "LLM",
    "Logprob",
    "MemoryPlanError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedModelError",
    "__version__",
    "load_model",
    "plan",
    "show",
    "calibrate",
    "compare",
    "Drawing",
    "Comparison",
}

WITHOUT_JAX = [
    "jaxserve",
    "jaxserve.api.config",
    "jaxserve.api.errors",
    "jaxserve.api.field_checks",
    "jaxserve.api.logprobs",
    "jaxserve.api.outputs",
    "jaxserve.api.pooling_params",
    "jaxserve.api.request",
    "jaxserve.api.sampling_params",
    "jaxserve.api.structured_params",
    "jaxserve.demo",
    "jaxserve.text.detokenizer",
    "jaxserve.scheduling.page_allocator",
    "jaxserve.scheduling.plan",
    "jaxserve.scheduling.scheduler",
    "jaxserve.scheduling.sequence",
]


def python(code: str, repository: Path) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


def test_exported_names() -> None:
    """A name that goes, or comes without this list, breaks somebody's program or escapes review."""
    assert set(jaxserve.__all__) == EXPORTED
    assert set(dir(jaxserve)) >= EXPORTED
    for name in EXPORTED:
        assert getattr(jaxserve, name).__class__ is not None


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'jaxserve' has no attribute 'LLMs'"):
        _ = jaxserve.LLMs


def test_errors_are_value_errors_but_for_a_dead_engine() -> None:
    for name in ("ConfigError", "MemoryPlanError", "RequestError", "UnsupportedModelError"):
        error = getattr(jaxserve, name)
        assert issubclass(error, ValueError)
        assert issubclass(error, jaxserve.JaxserveError)
    assert issubclass(jaxserve.EngineDeadError, RuntimeError)
    assert not issubclass(jaxserve.EngineDeadError, ValueError)


def test_policy_and_request_types_do_not_import_jax(repository: Path) -> None:
    imports = "; ".join(f"import {module}" for module in WITHOUT_JAX)
    heavy = "{'jax', 'flax', 'orbax', 'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    assert python(f"import sys; {imports}; print(sorted({heavy}))", repository) == "[]"


def test_the_engine_does_not_import_torch(repository: Path) -> None:
    assert (
        python("import sys; from jaxserve import LLM, load_model; print('torch' in sys.modules)", repository) == "False"
    )


def test_importing_starts_no_backend(repository: Path) -> None:
    code = "from jaxserve import LLM; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(code, repository) == "False"
