"""A proposer for benchmarks: it knows each text, and proposes wrong tokens at a set rate."""

from collections.abc import Sequence as Items

import numpy as np

from jaxserve.scheduling.sequence import Sequence


class Replay:
    """Proposes the tokens that follow in known texts, each replaced by a wrong one with a set probability.

    How many drafts are accepted is then known beforehand, whatever the model and its text.

    Args:
        num_tokens: Most drafts after the tokens of steps in flight.
        acceptance: Probability that a proposed token is the right one.
        vocab_size: Number of tokens.
    """

    def __init__(self, num_tokens: int, acceptance: float, vocab_size: int):
        self._num_tokens = num_tokens
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._proposals: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt: list[int], output: list[int], seed: int) -> None:
        """Remember the output that follows a prompt; ``seed`` chooses which of its tokens are proposed wrongly."""
        is_wrong = np.random.default_rng((seed, *prompt)).random(len(output)) >= self._acceptance
        self._proposals[tuple(prompt)] = ((np.array(output) + is_wrong) % self._vocab_size).tolist()

    def propose(self, sequences: Items[Sequence]) -> list[list[int]]:
        """See ``DraftProposer``."""
        return [self._following(sequence) for sequence in sequences]

    def finish(self, sequence: Sequence) -> None:
        """See ``DraftProposer``: the text stays known."""

    def forget(self, sequence: Sequence) -> None:
        """See ``DraftProposer``: the text stays known."""

    def _following(self, sequence: Sequence) -> list[int]:
        proposal = self._proposals[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        start = sequence.num_output_tokens
        return proposal[start : start + sequence.num_pending - 1 + self._num_tokens]
