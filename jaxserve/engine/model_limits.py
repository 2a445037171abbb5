"""What the model and the engine's settings allow a request."""

import dataclasses
import hashlib
from collections.abc import Mapping

from jaxserve.errors import RequestError
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.rope import length_regime
from jaxserve.structured_output.reasoning import ReasoningMarks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What a request must keep to, and what it can ask for.

    Attributes:
        max_model_len: Longest context in tokens.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end a text.
        max_logprobs: Most alternatives reported at a position.
        has_priorities: Whether the scheduler goes by priority.
        shares_prefixes: Whether requests share the pages of what they begin with.
        arguments: What the logits processors read of ``extra_args``, with the values that change nothing.
        reasoning: How the model marks its reasoning; None where it has none.
        rope: The model's rotary embedding.
        model_key: Tells this model's keys and values from those of any other.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    has_priorities: bool = False
    shares_prefixes: bool = True
    arguments: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    reasoning: ReasoningMarks | None = None
    rope: RopeConfig | None = None
    model_key: bytes = b""

    def check_priority(self, priority: int) -> None:
        """Refuses a priority that the scheduler would not go by.

        Raises:
            RequestError: It is not 0, and the scheduler does not go by it.
        """
        if priority and not self.has_priorities:
            message = "priority needs an engine with scheduling_policy='priority'; this one runs 'fcfs'"
            raise RequestError(message, parameter="priority", value=priority)

    def cache_root(self, salt: str | None, request_id: str, final_length: int) -> bytes:
        """What tells a request's keys and values from those of other models, rotary regimes, tenants.

        Args:
            salt: Of the request; only those of the same salt share.
            request_id: Its name.
            final_length: Most tokens it can have at the end.
        """
        regime = 0 if self.rope is None else length_regime(self.rope, final_length)
        shared = "" if self.shares_prefixes else request_id
        parts = (self.model_key, str(regime).encode(), shared.encode(), (salt or "").encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
