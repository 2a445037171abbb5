"""Pages whose tokens several devices share: their size, and the memory of what the devices exchange."""

from jaxserve.config import EngineConfig
from jaxserve.config_checks import BLOCK_SIZES
from jaxserve.device.program import ModelProgram
from jaxserve.errors import ConfigError
from jaxserve.layers.parallel import Parallel

_PAGE_SIZE = 64


def page_size_of(config: EngineConfig, parallel: Parallel, layout: str) -> int:
    """Return the tokens per page: by default 64, or the least larger number of which each device that shares them has a
    multiple of 8.

    Raises:
        ConfigError: The layout splits the tokens of pages over devices that cannot share them equally.
    """
    parts, size = parallel.num_token_parts, config.block_size
    default = -(-_PAGE_SIZE // (8 * parts)) * 8 * parts
    if size is not None and size % parts:
        valid = ", ".join(str(each) for each in BLOCK_SIZES if each % parts == 0)
        raise ConfigError(
            f"block_size={size} is not a multiple of the {parts} devices that share the tokens of a page in layout "
            f"{layout!r}; {f'use one of {valid}' if valid else f'omit it to get pages of {default} tokens'}"
        )
    return default if size is None else size


def exchanged_per_token(program: ModelProgram) -> int:
    """Return the bytes per token of a layer's queries of all heads, and of their partial attention as computed, as sent
    and as received, in float32; 0 if no devices share tokens."""
    if program.parallel.num_token_parts == 1:
        return 0
    specs = program.abstract_model.kv_specs
    return 4 * max(each.num_heads * (each.head_dim + 3 * ((each.value_dim or each.head_dim) + 2)) for each in specs)
