"""Parameters that reduce a prompt's hidden states to one vector: vLLM's names (`vllm/pooling_params.py`)."""

import dataclasses
from typing import Literal

from jaxserve.api.field_checks import Values, changed_fields, checks_fields, flag, wrong_field

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def _checked(values: Values) -> Values:
    pooling, dimensions = values["pooling"], values["dimensions"]
    if pooling not in POOLINGS:
        raise wrong_field("pooling", pooling, f"must be one of {', '.join(POOLINGS)}; got {pooling!r}")
    if dimensions is not None:
        problem = f"must be None: the vectors of a generative model cannot be shortened; got {dimensions!r}"
        raise wrong_field("dimensions", dimensions, problem)
    return {**values, "normalize": flag("normalize", values["normalize"])}


@checks_fields(_checked)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PoolingParams:
    """Pooling settings of one request. Immutable.

    The hidden states are the input of the head, after the last norm: `last_hidden_state` of transformers.

    Raises:
      RequestError: A value of the wrong type or out of range, or an unknown name.
    """

    pooling: Pooling = "last"
    """`last` takes the last token's hidden state, vLLM's default for generative models; `mean` that of all tokens."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: None = None
    """Length of the vector, for models trained with Matryoshka embeddings: generative models are not, so only None."""

    def __repr__(self) -> str:
        return changed_fields(self)


def check_pooling_task(task: object) -> None:
    """Reject tasks that a generative model cannot do.

    Raises:
      RequestError: The task is neither None nor `embed`.
    """
    if task not in (None, "embed"):
        raise wrong_field("pooling_task", task, f"must be 'embed', the only task of a generative model; got {task!r}")
