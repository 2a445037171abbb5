"""jaxserve: LLM inference in JAX. ``from jaxserve import LLM, SamplingParams``.

Names are loaded when they are first used, so that importing a part of the package does not import JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from jaxserve.async_llm import AsyncLLM
    from jaxserve.config import EngineConfig
    from jaxserve.errors import (
        ConfigError,
        EngineDeadError,
        JaxserveError,
        MemoryPlanError,
        RequestError,
        UnsupportedModelError,
    )
    from jaxserve.lab.calibration import calibrate
    from jaxserve.lab.compare import compare
    from jaxserve.lab.compare_result import Comparison
    from jaxserve.lab.plan import plan
    from jaxserve.lab.show import Drawing, show
    from jaxserve.llm import LLM
    from jaxserve.logprobs import FlatLogprobs, Logprob
    from jaxserve.models.loading import load_model
    from jaxserve.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
    )
    from jaxserve.pooling_params import PoolingParams
    from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxserve.structured_params import RepetitionDetectionParams, StructuredOutputsParams

_EXPORTS = {
    "jaxserve.async_llm": "AsyncLLM",
    "jaxserve.config": "EngineConfig",
    "jaxserve.errors": "ConfigError EngineDeadError JaxserveError MemoryPlanError RequestError UnsupportedModelError",
    "jaxserve.lab.calibration": "calibrate",
    "jaxserve.lab.compare": "compare",
    "jaxserve.lab.compare_result": "Comparison",
    "jaxserve.lab.plan": "plan",
    "jaxserve.lab.show": "Drawing show",
    "jaxserve.llm": "LLM",
    "jaxserve.logprobs": "FlatLogprobs Logprob",
    "jaxserve.models.loading": "load_model",
    "jaxserve.outputs": "BeamSearchOutput BeamSearchSequence CompletionOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingRequestOutput RequestOutput",
    "jaxserve.pooling_params": "PoolingParams",
    "jaxserve.sampling_params": "BeamSearchParams RequestOutputKind SamplingParams",
    "jaxserve.structured_params": "RepetitionDetectionParams StructuredOutputsParams",
}
"""Names that each module exports, separated by spaces."""

__all__ = [
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Comparison",
    "CompletionOutput",
    "ConfigError",
    "Drawing",
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
    "calibrate",
    "compare",
    "load_model",
    "plan",
    "show",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("jaxserve")
    for module, names in _EXPORTS.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
