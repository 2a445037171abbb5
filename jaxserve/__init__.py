"""jaxserve: LLM inference in JAX. ``from jaxserve import LLM, SamplingParams``.

Names are loaded when they are first used, so that importing a part of the package does not import JAX.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from jaxserve.api.config import EngineConfig as EngineConfig
    from jaxserve.api.errors import ConfigError as ConfigError
    from jaxserve.api.errors import EngineDeadError as EngineDeadError
    from jaxserve.api.errors import JaxserveError as JaxserveError
    from jaxserve.api.errors import MemoryPlanError as MemoryPlanError
    from jaxserve.api.errors import RequestError as RequestError
    from jaxserve.api.errors import UnsupportedModelError as UnsupportedModelError
    from jaxserve.api.logprobs import FlatLogprobs as FlatLogprobs
    from jaxserve.api.logprobs import Logprob as Logprob
    from jaxserve.api.outputs import BeamSearchOutput as BeamSearchOutput
    from jaxserve.api.outputs import BeamSearchSequence as BeamSearchSequence
    from jaxserve.api.outputs import CompletionOutput as CompletionOutput
    from jaxserve.api.outputs import EmbeddingOutput as EmbeddingOutput
    from jaxserve.api.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from jaxserve.api.outputs import PoolingOutput as PoolingOutput
    from jaxserve.api.outputs import PoolingRequestOutput as PoolingRequestOutput
    from jaxserve.api.outputs import RequestOutput as RequestOutput
    from jaxserve.api.pooling_params import PoolingParams as PoolingParams
    from jaxserve.api.sampling_params import BeamSearchParams as BeamSearchParams
    from jaxserve.api.sampling_params import RequestOutputKind as RequestOutputKind
    from jaxserve.api.sampling_params import SamplingParams as SamplingParams
    from jaxserve.api.structured_params import RepetitionDetectionParams as RepetitionDetectionParams
    from jaxserve.api.structured_params import StructuredOutputsParams as StructuredOutputsParams
    from jaxserve.async_llm import AsyncLLM as AsyncLLM
    from jaxserve.lab.calibration import calibrate as calibrate
    from jaxserve.lab.compare.compare import compare as compare
    from jaxserve.lab.compare.result import Comparison as Comparison
    from jaxserve.lab.plan.plan import plan as plan
    from jaxserve.lab.show.show import Drawing as Drawing
    from jaxserve.lab.show.show import show as show
    from jaxserve.llm import LLM as LLM
    from jaxserve.models.loading import load_model as load_model

_EXPORTS = {
    "AsyncLLM": "jaxserve.async_llm",
    "EngineConfig": "jaxserve.api.config",
    "ConfigError": "jaxserve.api.errors",
    "EngineDeadError": "jaxserve.api.errors",
    "JaxserveError": "jaxserve.api.errors",
    "MemoryPlanError": "jaxserve.api.errors",
    "RequestError": "jaxserve.api.errors",
    "UnsupportedModelError": "jaxserve.api.errors",
    "LLM": "jaxserve.llm",
    "calibrate": "jaxserve.lab.calibration",
    "compare": "jaxserve.lab.compare.compare",
    "Comparison": "jaxserve.lab.compare.result",
    "plan": "jaxserve.lab.plan.plan",
    "Drawing": "jaxserve.lab.show.show",
    "show": "jaxserve.lab.show.show",
    "FlatLogprobs": "jaxserve.api.logprobs",
    "Logprob": "jaxserve.api.logprobs",
    "load_model": "jaxserve.models.loading",
    "BeamSearchOutput": "jaxserve.api.outputs",
    "BeamSearchSequence": "jaxserve.api.outputs",
    "CompletionOutput": "jaxserve.api.outputs",
    "EmbeddingOutput": "jaxserve.api.outputs",
    "EmbeddingRequestOutput": "jaxserve.api.outputs",
    "PoolingOutput": "jaxserve.api.outputs",
    "PoolingRequestOutput": "jaxserve.api.outputs",
    "RequestOutput": "jaxserve.api.outputs",
    "PoolingParams": "jaxserve.api.pooling_params",
    "BeamSearchParams": "jaxserve.api.sampling_params",
    "RequestOutputKind": "jaxserve.api.sampling_params",
    "SamplingParams": "jaxserve.api.sampling_params",
    "RepetitionDetectionParams": "jaxserve.api.structured_params",
    "StructuredOutputsParams": "jaxserve.api.structured_params",
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
