"""Limits that the model and the engine's settings put on requests."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping

from jaxserve.api.draft_metrics import DraftReport
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.layers.model_config import RopeConfig
from jaxserve.layers.rope import length_regime
from jaxserve.structured_output.reasoning import ReasoningMarkers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits and features that requests are checked against.

    Attributes:
        max_model_len: Maximum context length in tokens.
        vocab_size: Vocabulary size.
        eos_token_ids: End-of-sequence tokens.
        max_logprobs: Most alternatives reported per token; -1 for no limit.
        max_logprobs_per_request: Most logprobs of a prompt and its completions; -1 for no limit.
        has_priorities: Whether the engine uses priority scheduling.
        shares_prefixes: Whether prefix caching is enabled.
        arguments: Names and default values of the logits processors' arguments in ``extra_args``.
        reasoning: Tokens that delimit reasoning; None if the model has none.
        rope: Rotary embedding of the model, if cached keys depend on the final length (``length_regime``).
        model_key: Identifies the model in prefix cache keys.
        draft_report: What is reported about the drafts of each completion; None: nothing.
        generates: Whether the engine generates tokens; False: it computes embeddings alone.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    max_logprobs_per_request: int = -1
    has_priorities: bool = False
    shares_prefixes: bool = True
    arguments: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    reasoning: ReasoningMarkers | None = None
    rope: RopeConfig | None = None
    model_key: bytes = b""
    draft_report: DraftReport | None = None
    generates: bool = True

    def fit_logprobs(self, params: SamplingParams, num_prompt_tokens: int, is_strict: bool) -> SamplingParams:
        """Return the parameters with a ``max_tokens`` whose logprobs are not too many.

        Args:
            params: Parameters of the request, with a ``max_tokens``.
            num_prompt_tokens: Length of the prompt.
            is_strict: Whether to reject a ``max_tokens`` with too many rather than reduce it.

        Raises:
            RequestError: The prompt, or the tokens that are asked for, have more than ``max_logprobs_per_request``.
        """
        limit, num_tokens = self.max_logprobs_per_request, params.max_tokens
        if limit < 0 or num_tokens is None or not params.needs_logprobs:
            return params
        num_of_prompt = num_prompt_tokens * self._num_entries(params.prompt_logprobs)
        per_token = params.n * self._num_entries(params.num_logprobs)
        fewest = num_tokens if is_strict else max(params.min_tokens, 1)
        if num_of_prompt + per_token * fewest > limit:
            name = "prompt_logprobs" if num_of_prompt > limit else "logprobs"
            raise RequestError(
                f"{name}: this request has {num_of_prompt} logprobs of {num_prompt_tokens} prompt tokens and "
                f"{per_token * fewest} of {params.n} x {fewest} output tokens; limit {limit} "
                "(max_logprobs_per_request). Ask for fewer logprobs, tokens or completions",
                parameter=name,
                value=num_of_prompt + per_token * fewest,
            )
        most = (limit - num_of_prompt) // per_token if per_token else num_tokens
        return params if num_tokens <= most else params.clone(max_tokens=most)

    def _num_entries(self, num_logprobs: int | None) -> int:
        """Return the number of entries of a position with this many logprobs besides the token's own; None: none."""
        if num_logprobs is None:
            return 0
        return 1 + (self.vocab_size if num_logprobs == -1 else num_logprobs)

    def check_generates(self) -> None:
        """Check that the engine generates tokens.

        Raises:
            RequestError: It computes embeddings alone.
        """
        if not self.generates:
            raise RequestError(
                "this engine computes embeddings only: it runs with runner='pooling', or the checkpoint has no output "
                "head (lm_head); send the request to an engine with runner='generate'"
            )

    def check_priority(self, priority: int) -> None:
        """Check that a priority, which is not 0, has an effect: that the engine uses priority scheduling.

        Raises:
            RequestError: The priority would be ignored.
        """
        if not self.has_priorities:
            message = "priority requires scheduling_policy='priority'; this engine uses 'fcfs'"
            raise RequestError(message, parameter="priority", value=priority)

    def cache_root(self, salt: str | None, request_id: str, final_length: int) -> bytes:
        """Return the prefix cache root: requests share pages if model, RoPE regime and salt are the same.

        Args:
            salt: Cache salt of the request.
            request_id: Name of the request; part of the root if prefix caching is disabled.
            final_length: Most tokens that the request can reach, prompt included; selects the RoPE regime.
        """
        regime = 0 if self.rope is None else length_regime(self.rope, final_length)
        return _cache_root(self.model_key, regime, "" if self.shares_prefixes else request_id, salt or "")


@functools.lru_cache(maxsize=64)
def _cache_root(model_key: bytes, regime: int, shared: str, salt: str) -> bytes:
    parts = (model_key, str(regime).encode(), shared.encode(), salt.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
