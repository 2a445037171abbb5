"""Settings that recurrent layers cannot have, refused before anything is loaded."""

import logging

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


def check_recurrent(config: EngineConfig, module: CausalLM) -> None:
    """Check the settings of an engine for a model with recurrent layers.

    Raises:
        ConfigError: Drafts are verified: a state has taken in the rejected ones too, and cannot go back.
    """
    if not any(module.state_specs):
        return
    name = module.config.architecture
    if config.enable_prefix_caching:
        logger.info(
            "Prefix cache: %s has recurrent layers, whose states are not cached; prompts are computed whole", name
        )
    if config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config is not supported for {name}: its recurrent layers overwrite their states with every "
            "token, so that a rejected draft could not be taken back; remove speculative_config"
        )
