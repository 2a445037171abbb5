"""What ``LLM`` and ``AsyncLLM`` share: a started engine, its loop, and what can be asked about it."""

import abc
import atexit
import logging
import weakref
from typing import Any

from jaxserve.api.config import EngineConfig
from jaxserve.api.metric_types import Metric
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.device.memory import MemoryLedger
from jaxserve.engine.loop import Loop
from jaxserve.engine.resharding import Resharder
from jaxserve.engine.startup import StartedEngine, start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.models.drafters.speculators import with_verifier
from jaxserve.text.chat_prompt import read_template
from jaxserve.text.render_pool import RenderPool

logger = logging.getLogger(__name__)


class RunningModel(abc.ABC):
    """A model on its devices, and the thread that steps it.

    Args:
        config: The engine's settings.
    """

    def __init__(self, config: EngineConfig):
        config = with_verifier(config)
        self._chat_template = read_template(config.chat_template)
        self._renderer = RenderPool()
        weakref.finalize(self, self._renderer.close)
        self._resharder = Resharder(config, start_engine(config))
        logger.info("%s", self.ledger)
        self.engine = self._started.engine
        stats = None if config.disable_log_stats else StatsLogger(self.ledger.device)
        self._loop = Loop(self.engine, stats, self._is_on_demand)
        # At exit the thread must end before JAX shuts down. The reference is weak so that unused engines free their
        # memory.
        atexit.register(self._loop.stop)
        weakref.finalize(self, self._loop.stop).atexit = False

    @property
    @abc.abstractmethod
    def _is_on_demand(self) -> bool:
        """See ``Loop``."""

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""
        return self._resharder.config

    @property
    def ledger(self) -> MemoryLedger:
        """Memory use of a device."""
        return self._started.ledger

    @property
    def _started(self) -> StartedEngine:
        return self._resharder.started

    def get_tokenizer(self) -> Any:
        """Return transformers' tokenizer, or jaxserve's own if transformers would read the files incorrectly."""
        return self._started.public_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: the model's generation_config.json with its overrides."""
        return self._started.default_params

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics: ``Counter``, ``Gauge`` and ``Histogram`` objects. Does not block."""
        return self.engine.metrics()

    def _stop(self, drain_s: float = 0.0) -> None:
        """Stop the loop, free the devices' memory, and wait for its threads."""
        self._loop.stop(drain_s)
        self._renderer.close()
        self._loop.join_preparation()
        atexit.unregister(self._loop.stop)
