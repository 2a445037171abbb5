"""jaxserve: LLM inference in JAX. ``from jaxserve import LLM, SamplingParams``.

Names are loaded when they are first used, so that importing a part of the package does not import JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from jaxserve.api.config import EngineConfig
    from jaxserve.api.errors import (
        ConfigError,
        EngineDeadError,
        JaxserveError,
        MemoryPlanError,
        RequestError,
        UnsupportedModelError,
    )
    from jaxserve.api.logprobs import FlatLogprobs, Logprob
    from jaxserve.api.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
    )
    from jaxserve.api.pooling_params import PoolingParams
    from jaxserve.api.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxserve.api.structured_params import RepetitionDetectionParams, StructuredOutputsParams
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.lab.calibration import calibrate
    from jaxserve.lab.compare.compare import compare
    from jaxserve.lab.compare.result import Comparison
    from jaxserve.lab.plan.plan import plan
    from jaxserve.lab.show.show import Drawing, show
    from jaxserve.llm import LLM
    from jaxserve.models.loading import load_model

_EXPORTS = {
    "jaxserve.async_llm": "AsyncLLM",
    "jaxserve.api.config": "EngineConfig",
    "jaxserve.api.errors": "ConfigError EngineDeadError JaxserveError MemoryPlanError RequestError "
    "UnsupportedModelError",
    "jaxserve.lab.calibration": "calibrate",
    "jaxserve.lab.compare.compare": "compare",
    "jaxserve.lab.compare.result": "Comparison",
    "jaxserve.lab.plan.plan": "plan",
    "jaxserve.lab.show.show": "Drawing show",
    "jaxserve.llm": "LLM",
    "jaxserve.api.logprobs": "FlatLogprobs Logprob",
    "jaxserve.models.loading": "load_model",
    "jaxserve.api.outputs": "BeamSearchOutput BeamSearchSequence CompletionOutput EmbeddingOutput "
    "EmbeddingRequestOutput PoolingOutput PoolingRequestOutput RequestOutput",
    "jaxserve.api.pooling_params": "PoolingParams",
    "jaxserve.api.sampling_params": "BeamSearchParams RequestOutputKind SamplingParams",
    "jaxserve.api.structured_params": "RepetitionDetectionParams StructuredOutputsParams",
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
