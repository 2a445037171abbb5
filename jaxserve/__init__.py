"""jaxserve: LLM inference in JAX. ``from jaxserve import LLM, SamplingParams``.

Names are loaded when they are first used, so that importing a part of the package does not import JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from jaxserve.async_llm import AsyncLLM as AsyncLLM
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.errors import ConfigError as ConfigError
    from jaxserve.errors import EngineDeadError as EngineDeadError
    from jaxserve.errors import JaxserveError as JaxserveError
    from jaxserve.errors import MemoryPlanError as MemoryPlanError
    from jaxserve.errors import RequestError as RequestError
    from jaxserve.errors import UnsupportedModelError as UnsupportedModelError
    from jaxserve.lab.calibration import calibrate as calibrate
    from jaxserve.lab.compare import compare as compare
    from jaxserve.lab.compare_result import Comparison as Comparison
    from jaxserve.lab.plan import plan as plan
    from jaxserve.lab.show import Drawing as Drawing
    from jaxserve.lab.show import show as show
    from jaxserve.llm import LLM as LLM
    from jaxserve.logprobs import FlatLogprobs as FlatLogprobs
    from jaxserve.logprobs import Logprob as Logprob
    from jaxserve.models.loading import load_model as load_model
    from jaxserve.outputs import BeamSearchOutput as BeamSearchOutput
    from jaxserve.outputs import BeamSearchSequence as BeamSearchSequence
    from jaxserve.outputs import CompletionOutput as CompletionOutput
    from jaxserve.outputs import EmbeddingOutput as EmbeddingOutput
    from jaxserve.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from jaxserve.outputs import PoolingOutput as PoolingOutput
    from jaxserve.outputs import PoolingRequestOutput as PoolingRequestOutput
    from jaxserve.outputs import RequestOutput as RequestOutput
    from jaxserve.pooling_params import PoolingParams as PoolingParams
    from jaxserve.sampling_params import BeamSearchParams as BeamSearchParams
    from jaxserve.sampling_params import RequestOutputKind as RequestOutputKind
    from jaxserve.sampling_params import SamplingParams as SamplingParams
    from jaxserve.structured_params import RepetitionDetectionParams as RepetitionDetectionParams
    from jaxserve.structured_params import StructuredOutputsParams as StructuredOutputsParams

_EXPORTS = {
    "AsyncLLM": "jaxserve.async_llm",
    "EngineConfig": "jaxserve.config",
    "ConfigError": "jaxserve.errors",
    "EngineDeadError": "jaxserve.errors",
    "JaxserveError": "jaxserve.errors",
    "MemoryPlanError": "jaxserve.errors",
    "RequestError": "jaxserve.errors",
    "UnsupportedModelError": "jaxserve.errors",
    "LLM": "jaxserve.llm",
    "calibrate": "jaxserve.lab.calibration",
    "compare": "jaxserve.lab.compare",
    "Comparison": "jaxserve.lab.compare_result",
    "plan": "jaxserve.lab.plan",
    "Drawing": "jaxserve.lab.show",
    "show": "jaxserve.lab.show",
    "FlatLogprobs": "jaxserve.logprobs",
    "Logprob": "jaxserve.logprobs",
    "load_model": "jaxserve.models.loading",
    "BeamSearchOutput": "jaxserve.outputs",
    "BeamSearchSequence": "jaxserve.outputs",
    "CompletionOutput": "jaxserve.outputs",
    "EmbeddingOutput": "jaxserve.outputs",
    "EmbeddingRequestOutput": "jaxserve.outputs",
    "PoolingOutput": "jaxserve.outputs",
    "PoolingRequestOutput": "jaxserve.outputs",
    "RequestOutput": "jaxserve.outputs",
    "PoolingParams": "jaxserve.pooling_params",
    "BeamSearchParams": "jaxserve.sampling_params",
    "RequestOutputKind": "jaxserve.sampling_params",
    "SamplingParams": "jaxserve.sampling_params",
    "RepetitionDetectionParams": "jaxserve.structured_params",
    "StructuredOutputsParams": "jaxserve.structured_params",
}

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
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
