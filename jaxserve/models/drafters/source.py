"""Finds, checks and loads the draft head that ``speculative_config`` asks for."""

import dataclasses
from pathlib import Path

import jax
from flax import nnx

from checkpoints import Listings, check_recipes, open_checkpoint
from jaxserve.layers.model_config import ModelConfig
from jaxserve.layers.parallel import Scope
from jaxserve.models.abstract import AbstractModel, ShardingOf, abstract_head
from jaxserve.models.drafters.dflash import DFlashConfig, DFlashHead
from jaxserve.models.drafters.dflash_config import read_dflash
from jaxserve.models.drafters.draft_head import DraftHead
from jaxserve.models.drafters.eagle import EagleConfig, EagleHead, read_eagle
from jaxserve.models.drafters.eagle3 import Eagle3Config, Eagle3Head
from jaxserve.models.drafters.eagle3_config import read_eagle3
from jaxserve.models.drafters.mtp import MTPHead, check_has_layer, mtp_config
from jaxserve.models.loading import load_weights
from jaxserve.models.sparse_decoder import SparseConfig


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """A draft head and its checkpoint.

    Attributes:
        directory: The checkpoint: an EAGLE head's own, or for an MTP layer the target's.
        config: The head, or the target with an MTP layer.
        load_format: As in ``EngineConfig``.
    """

    directory: Path
    config: EagleConfig | Eagle3Config | DFlashConfig | SparseConfig
    load_format: str = "auto"

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads."""
        return self.config.aux_layers if isinstance(self.config, Eagle3Config | DFlashConfig) else ()

    @property
    def in_one_pass(self) -> bool:
        """Whether the head guesses all tokens in one pass, at mask tokens."""
        return self.drafts_blocks or (isinstance(self.config, Eagle3Config) and self.config.mask_size is not None)

    @property
    def drafts_blocks(self) -> bool:
        """Whether each of these mask tokens sees all others, and keys and values are those of target's states alone; if
        not, the head combines each token with the state of the token before it, which is kept between steps."""
        return isinstance(self.config, DFlashConfig)

    def build(self, scope: Scope) -> DraftHead:
        """Build the head in the target's scope; each device has all rows of its hidden states, and its own output
        head's logits."""
        parallel = dataclasses.replace(scope.parallel, residual="replicated", logits="gathered")
        scope = dataclasses.replace(scope, parallel=parallel)
        if isinstance(self.config, Eagle3Config):
            return Eagle3Head(self.config, scope=scope)
        if isinstance(self.config, DFlashConfig):
            return DFlashHead(self.config, scope=scope)
        if isinstance(self.config, EagleConfig):
            return EagleHead(self.config, scope=scope)
        return MTPHead(self.config, scope=scope)

    def outline(self, scope: Scope) -> DraftHead:
        """Return the head without values."""
        return nnx.eval_shape(lambda: self.build(scope))

    def abstract(self, scope: Scope, sharding: ShardingOf) -> AbstractModel:
        """Return the head without values; see ``abstract_head``."""
        return abstract_head(self.build, scope, sharding)

    def check(self, head: AbstractModel, target: Listings) -> None:
        """Compare the tensors of the checkpoint with those that the head needs, before any expensive work.

        Args:
            head: The head without values.
            target: Forms in which checkpoints may have the target's tensors.

        Raises:
            ConfigError: It lost its MTP layer.
            CheckpointError: Files or tensors are missing, damaged, unexpected or of the wrong shape.
        """
        is_own = not isinstance(self.config, SparseConfig)
        with open_checkpoint(self.directory, None if is_own else target, self.load_format) as reader:
            if isinstance(self.config, SparseConfig):
                check_has_layer(self.config, reader.tensors, self.directory)
            check_recipes(reader.tensors, head.recipes_for(reader.tensors), head.ignored if is_own else [".*"])

    def load(self, head: AbstractModel, target: Listings) -> tuple[jax.Array, ...]:
        """Read the head's parameters onto devices; see ``load_weights``."""
        whole = target if isinstance(self.config, SparseConfig) else None
        return load_weights(self.directory, head, whole, self.load_format)


def find_head(
    method: str, directory: Path, target: ModelConfig, load_format: str = "auto", in_one_pass: bool = False
) -> HeadSource:
    """Return the draft head of a method.

    Args:
        method: ``mtp``, ``eagle``, ``eagle3`` or ``dflash``.
        directory: The head's directory; for ``mtp`` the target's.
        target: The target.
        load_format: As in ``EngineConfig``.
        in_one_pass: As in ``read_eagle3``.

    Raises:
        ConfigError: The target has no such layer, or the head is not one of this target.
        CheckpointError: The head's checkpoint cannot be read.
    """
    if method == "mtp":
        return HeadSource(directory, mtp_config(target), load_format)
    if method != "eagle3":
        read = {"eagle": read_eagle, "dflash": read_dflash}[method]
        return HeadSource(directory, read(directory, target, load_format), load_format)
    return HeadSource(directory, read_eagle3(directory, target, load_format, in_one_pass), load_format)
