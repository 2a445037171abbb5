"""Choose an engine's layout, pipeline stages and page size, and check that the modules can be split so."""

import math

from jaxserve.api.config import EngineConfig
from jaxserve.api.config_checks import BLOCK_SIZES
from jaxserve.api.errors import ConfigError
from jaxserve.device.sharded_model import ShardedModel
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Parallel
from jaxserve.models.stage_balance import check_cuts, divide
from jaxserve.models.stages import StageLayers, stages_of
from sharding import LAYOUTS, LayoutError, ShardingLayout, get_layout

_PAGE_SIZE = 64


def choose_layout(config: EngineConfig, model: ModelConfig) -> ShardingLayout:
    """Return the layout that the settings name, or the one that expert parallelism means.

    Raises:
        ConfigError: Expert parallelism is requested with a layout that does not split experts over its axis, or for a
            model without experts.
        LayoutError: The layout is unknown, or contradicts itself.
    """
    layout = config.layout
    if not isinstance(layout, str | ShardingLayout):
        raise ConfigError(f"layout: expected a name, path.py:NAME or a ShardingLayout, got {layout!r}")
    layout = get_layout(layout) if isinstance(layout, str) else layout
    _check_axes(layout, has_experts=model.has_experts)
    size = config.expert_parallel_size
    if size == 1 and not config.enable_expert_parallel:
        return layout
    setting = "enable_expert_parallel" if size == 1 else f"expert_parallel_size={size}"
    if size > 1 and config.enable_expert_parallel:
        raise ConfigError(
            f"{setting} splits experts over devices of their own, enable_expert_parallel over those of "
            "tensor_parallel_size; use only one of them"
        )
    axis, default = ("tensor", "expert_parallel") if size == 1 else ("expert", "expert_gather")
    if size > 1 and config.deterministic:
        default = "expert_all_to_all"  # adds the parts of a row in the same order on every device
    is_default = layout == get_layout("tensor_parallel")
    if not is_default and layout.mesh_axis("experts") != axis:
        names = " or ".join(f"layout={name!r}" for name in LAYOUTS if get_layout(name).mesh_axis("experts") == axis)
        raise ConfigError(f"{setting} needs {names}, got layout={layout.name!r}")
    if not model.has_experts:
        raise ConfigError(f"{setting} needs a model with experts; {model.architecture} has none")
    return get_layout(default) if is_default else layout


def _check_axes(layout: ShardingLayout, has_experts: bool) -> None:
    """Raise LayoutError if a layout splits something that the modules cannot split, or over an axis that they do not
    use."""
    rules = layout.rules
    whole = [logical for logical in ("embed", "head_dim") if logical in rules]
    if whole:
        raise LayoutError(f"layout {layout.name!r} splits {' and '.join(whole)}, which every device needs whole")
    slices = [f"{logical} over {axis}" for logical, axis in rules.items() if axis in ("data", "stage")]
    if slices:
        raise LayoutError(
            f"layout {layout.name!r} splits {', '.join(slices)}; a layout can use only the axes tensor and expert"
        )
    axes = {logical: rules.get(logical) for logical in ("q_heads", "kv_heads", "tokens", "ffn")}
    kv_axis = axes["tokens"] if axes["kv_heads"] is None else axes["kv_heads"]
    if axes["q_heads"] != kv_axis or axes["q_heads"] not in (None, axes["ffn"]):
        splits = ", ".join(f"{logical} over {axis}" for logical, axis in axes.items())
        raise LayoutError(
            f"layout {layout.name!r} has {splits}; q_heads, and either kv_heads or tokens, must be over the axis of "
            "ffn, or none of them be split"
        )
    for logical in ("vocab", "expert_ffn"):
        if rules.get(logical) not in (None, axes["ffn"]):
            raise LayoutError(
                f"layout {layout.name!r} splits {logical} over {rules[logical]}; it can be split only over the axis of "
                f"ffn, {axes['ffn']}"
            )
    if has_experts and axes["ffn"] not in (None, rules.get("expert_ffn"), rules.get("experts")):
        raise LayoutError(
            f"layout {layout.name!r} splits ffn over {axes['ffn']}; for a model with experts it must split "
            f"expert_ffn or experts over {axes['ffn']} too"
        )


def count_stages(config: EngineConfig, model: ModelConfig) -> int:
    """Return the number of pipeline stages.

    Raises:
        ConfigError: There are more stages than layers, or ``stage_layers`` has another number of stages or of layers.
    """
    size, counts, layers = config.pipeline_parallel_size, config.stage_layers, model.num_layers
    if counts is not None and size not in (1, len(counts)):
        raise ConfigError(f"stage_layers has {len(counts)} numbers, but pipeline_parallel_size={size}; use one of them")
    if counts is not None and sum(counts) != layers:
        total = " + ".join(map(str, counts))
        raise ConfigError(f"stage_layers: {total} = {sum(counts)} layers, but {model.architecture} has {layers}")
    if size > layers:
        raise ConfigError(
            f"pipeline_parallel_size={size} exceeds the {layers} layers of {model.architecture}; use 1 to {layers}"
        )
    return size if counts is None else len(counts)


def choose_stages(config: EngineConfig, sharded: ShardedModel, num_stages: int) -> list[StageLayers | None]:
    """Return the layers of each stage; [None] for a single stage.

    Raises:
        ConfigError: A layer would be apart from the one whose keys and values it reads.
    """
    if num_stages == 1:
        return [None]
    if config.stage_layers is not None:
        stages = stages_of(config.stage_layers)
        check_cuts(stages, sharded.abstract_model.kv_specs)
        return [*stages]
    return [*divide(sharded.abstract_model, num_stages)]


def page_size_of(config: EngineConfig, parallel: Parallel, layout: str, chunk: int = 0) -> int:
    """Return the tokens per page: by default 64, or the least larger number of which each device that shares them has a
    multiple of 8; their greatest common divisor with the tokens of a chunk.

    Args:
        config: The settings.
        parallel: How modules are split.
        layout: Name of the layout.
        chunk: Tokens of the chunks within which layers attend, which consist of whole pages; 0 for none.

    Raises:
        ConfigError: The layout splits the tokens of pages over devices that cannot share them equally, or chunks do
            not consist of whole pages.
    """
    parts, size = parallel.num_token_parts, config.block_size
    default = math.gcd(-(-_PAGE_SIZE // (8 * parts)) * 8 * parts, chunk)
    if size is not None and chunk % size:
        valid = ", ".join(str(each) for each in BLOCK_SIZES if chunk % each == 0)
        raise ConfigError(
            f"block_size={size} does not divide the model's attention chunks of {chunk} tokens; "
            f"{f'use one of {valid}, or ' if valid else ''}omit it to get pages of {default} tokens"
        )
    if size is None and default % parts:
        raise ConfigError(
            f"the model's attention chunks of {chunk} tokens are not whole pages for the {parts} devices that share "
            f"the tokens of a page in layout {layout!r}; use another layout, or max_model_len={chunk}"
        )
    if size is not None and size % parts:
        valid = ", ".join(str(each) for each in BLOCK_SIZES if each % parts == 0)
        raise ConfigError(
            f"block_size={size} is not a multiple of the {parts} devices that share the tokens of a page in layout "
            f"{layout!r}; {f'use one of {valid}' if valid else f'omit it to get pages of {default} tokens'}"
        )
    return default if size is None else size
