"""How the hidden states of a prompt become one vector: vLLM's names (`vllm/pooling_params.py`)."""

import dataclasses
from typing import Literal

from jaxserve.errors import RequestError
from jaxserve.field_checks import Values, changed_fields, checks_fields, flag

Pooling = Literal["last", "mean"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def _checked(values: Values) -> Values:
    pooling, dimensions = values["pooling"], values["dimensions"]
    if pooling not in POOLINGS:
        message = f"pooling must be one of {', '.join(POOLINGS)}; got {pooling!r}"
        raise RequestError(message, parameter="pooling", value=pooling)
    if dimensions is not None:
        message = f"dimensions must be None: a generative model's vectors cannot be shortened; got {dimensions!r}"
        raise RequestError(message, parameter="dimensions", value=dimensions)
    return {**values, "normalize": flag("normalize", values["normalize"])}


@checks_fields(_checked)
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PoolingParams:
    """How a prompt becomes a vector. Immutable.

    The hidden states are those that the head reads, behind the last norm: `last_hidden_state` of transformers.

    Raises:
      RequestError: A value of the wrong type or out of range, or an unknown name.
    """

    pooling: Pooling = "last"
    """`last` takes the last token's hidden state, vLLM's default for generative models; `mean` that of all tokens."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: None = None
    """Length of the vector, for models trained to have it shortened: no generative model is, so None alone."""

    def __repr__(self) -> str:
        return changed_fields(self)


def check_pooling_task(task: object) -> None:
    """Reject what a generative model cannot do.

    Raises:
      RequestError: The task is neither None nor `embed`.
    """
    if task not in (None, "embed"):
        message = f"pooling_task must be 'embed', since a generative model has no head for another; got {task!r}"
        raise RequestError(message, parameter="pooling_task", value=task)
