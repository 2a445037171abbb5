"""What a front end knows of the engine behind it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.proto.jaxserve.v1 import model_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine process says of itself when it is ready.

    Attributes:
        model: The model and what it runs on; ``id`` and ``created`` are empty.
        default_fields: The fields of ``SamplingParams`` that the model's generation_config.json sets.
        ledger: Where memory goes, as the start's log shows it.
        extra_arguments: Names that requests' ``extra_args`` may have.
        max_output_tokens: Most tokens that any request gets; None: as many as its context holds.
    """

    model: model_pb2.Model
    default_fields: dict[str, Any]
    ledger: str
    extra_arguments: tuple[str, ...] = ()
    max_output_tokens: int | None = None

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.model.max_model_len

    def sampling_params(self, given: dict[str, Any], *, is_chat: bool = False) -> SamplingParams:
        """The parameters of a request that gives some fields: the one place where those of every surface are checked.

        A field that is None counts as not given. What is not given has the model's default, and ``max_tokens`` else
        that of vLLM: all that the context holds for a conversation, 16 for other prompts. More than
        ``max_output_tokens`` becomes that many.

        Raises:
            RequestError: A field that there is not, or a value that is wrong.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if is_chat and "max_tokens" not in self.default_fields:
            values.setdefault("max_tokens", None)
        params = SamplingParams.from_optional(**{**self.default_fields, **values})
        limit = self.max_output_tokens
        if limit is not None and (params.max_tokens is None or params.max_tokens > limit):
            return params.clone(max_tokens=limit)
        return params


def find_max_output_tokens(arguments: Mapping[str, Any], default_fields: Mapping[str, Any]) -> int | None:
    """The ``max_new_tokens`` of whoever started the server: a limit, as in vLLM, where a model's own is a default."""
    if arguments.get("generation_config", "auto") not in ("auto", "vllm"):
        return default_fields.get("max_tokens")
    return (arguments.get("override_generation_config") or {}).get("max_new_tokens")
