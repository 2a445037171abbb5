"""Choose the number of pipeline stages and the layers of each."""

from jaxserve.config import EngineConfig
from jaxserve.device.program import ModelProgram
from jaxserve.errors import ConfigError
from jaxserve.layers.model_config import ModelConfig
from jaxserve.models.stage_balance import divide
from jaxserve.models.stages import Stage, stages_of


def count_stages(config: EngineConfig, model: ModelConfig) -> int:
    """Return the number of pipeline stages.

    Raises:
        ConfigError: There are more stages than layers, or ``stage_layers`` has another number of stages or of layers.
    """
    size, counts, layers = config.pipeline_parallel_size, config.stage_layers, model.num_layers
    if counts is not None and size not in (1, len(counts)):
        raise ConfigError(f"stage_layers has {len(counts)} numbers, but pipeline_parallel_size={size}; use one of them")
    if counts is not None and sum(counts) != layers:
        found = " + ".join(map(str, counts))
        raise ConfigError(f"stage_layers: {found} = {sum(counts)} layers, but {model.architecture} has {layers}")
    if size > layers:
        raise ConfigError(
            f"pipeline_parallel_size={size} exceeds the {layers} layers of {model.architecture}; use 1 to {layers}"
        )
    return size if counts is None else len(counts)


def choose_stages(config: EngineConfig, program: ModelProgram, num_stages: int) -> list[Stage | None]:
    """Return the layers of each stage; [None] for a single stage."""
    if num_stages == 1:
        return [None]
    if config.stage_layers is not None:
        return [*stages_of(config.stage_layers)]
    return [*divide(program.abstract_model, num_stages)]
