"""Routing of tokens to experts: scores of all experts, a choice of the best, and their weights."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Scoring = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts are chosen and weighted.

    Groups and the correction are DeepSeek's (arXiv:2405.04434, arXiv:2412.19437): experts form groups of equal size, a
    token chooses among the experts of its best groups only, and a bias that training adjusts to balance the load takes
    part in the choice but not in the weights.

    Attributes:
        num_experts: E.
        experts_per_token: k, experts that compute each token.
        is_normalized: Whether the weights of the chosen experts are scaled to a sum of 1; for a softmax this equals a
            softmax over their logits alone.
        scoring: Function of the router's logits: a softmax over all experts, a sigmoid of each, or SparseMixer-v2
            (arXiv:2409.12136), in which each of two experts has its share in a softmax over the logits near its own.
        num_groups: Number of groups, which divides E.
        groups_per_token: Groups that a token chooses from.
        experts_per_group_score: Experts whose scores, added, are the score of their group: its best ones.
        scale: Factor of the weights, after normalization.
        is_corrected: Whether the router has a bias for the choice.
        weighs_inputs: Whether the weights multiply what the experts are given, not what they compute (Llama 4).
        logit_cap: The router's logits become cap * tanh(logit / cap) (Laguna); None for no cap.
        sum_eps: Added to the sum that normalized weights are divided by.
        jitter: SparseMixer: half the relative distance within which a logit is near the best one.
    """

    num_experts: int
    experts_per_token: int
    is_normalized: bool
    scoring: Scoring = "softmax"
    num_groups: int = 1
    groups_per_token: int = 1
    experts_per_group_score: int = 1
    scale: float = 1.0
    is_corrected: bool = False
    weighs_inputs: bool = False
    logit_cap: float | None = None
    sum_eps: float = 1e-20
    jitter: float = 0.0

    def __call__(
        self, logits: Float[Array, "T E"], correction: Float[Array, " E"] | None = None
    ) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
        """Return the weights and indices of each token's experts, the best expert first."""
        if self.logit_cap is not None:
            logits = self.logit_cap * jnp.tanh(logits / self.logit_cap)
        if self.scoring == "sparsemixer":
            return self._sparse_mixed(logits)
        scores = jax.nn.softmax(logits, axis=-1) if self.scoring == "softmax" else jax.nn.sigmoid(logits)
        rated = scores if correction is None else scores + correction
        if self.groups_per_token < self.num_groups:
            rated = jnp.where(self._best_group_members(rated), rated, -jnp.inf)
        _, experts = lax.top_k(rated, self.experts_per_token)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if self.is_normalized:
            weights = weights / (weights.sum(-1, keepdims=True) + self.sum_eps)
        return (weights if self.scale == 1.0 else weights * self.scale), experts

    def _sparse_mixed(self, logits: Float[Array, "T E"]) -> tuple[Float[Array, "T 2"], Int[Array, "T 2"]]:
        """Return the weights and indices of both experts of SparseMixer."""
        size, left = jnp.abs(logits), logits
        weights, experts = list[Array](), list[Array]()
        for _ in range(self.experts_per_token):
            best, index = left.max(-1, keepdims=True), left.argmax(-1)[:, None]
            is_far = (best - logits) / jnp.maximum(size, best) > 2 * self.jitter
            shares = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left), axis=-1)
            weights.append(jnp.take_along_axis(shares, index, axis=1))
            experts.append(index)
            left = jnp.where(jnp.arange(self.num_experts) == index, -jnp.inf, left)
        return jnp.concatenate(weights, axis=1), jnp.concatenate(experts, axis=1)

    def _best_group_members(self, rated: Float[Array, "T E"]) -> Bool[Array, "T E"]:
        """Return which experts are in one of the token's best groups."""
        by_group = rated.reshape(rated.shape[0], self.num_groups, -1)
        group_scores = lax.top_k(by_group, self.experts_per_group_score)[0].sum(-1)
        _, best = lax.top_k(group_scores, self.groups_per_token)
        is_best = (best[:, :, None] == jnp.arange(self.num_groups)).any(1)
        return jnp.repeat(is_best, by_group.shape[2], axis=1, total_repeat_length=rated.shape[1])
