"""Beam search on top of the engine.

Each round submits every beam as a request for one token with the logprobs of the most likely next tokens: twice the
beam width, so that enough remain if some are end-of-sequence tokens. The prefix cache holds the pages of the previous
round, so that a round computes only a few tokens per beam.
"""

import dataclasses
from collections.abc import Callable, Sequence

from tqdm import tqdm

from jaxserve.api.errors import RequestError
from jaxserve.api.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from jaxserve.api.request import Request
from jaxserve.api.sampling_params import BeamSearchParams, SamplingParams
from jaxserve.engine.engine import Engine

Run = Callable[[Sequence[Request]], list[RequestOutput]]


@dataclasses.dataclass(slots=True, eq=False)
class _Search:
    """Active beams and completed sequences of one prompt."""

    prompt: Request
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = dataclasses.field(default_factory=list)


class BeamSearch:
    """Beam search for several prompts at once. As in vLLM, lengths include the prompt.

    Args:
        engine: Has the limits and the tokenizer, and prepares prompts.
        run: Runs requests to their ends, and returns their outputs in order.
        params: Parameters of the search.

    Raises:
        RequestError: ``max_logprobs`` is less than twice the beam width.
    """

    def __init__(self, engine: Engine, run: Run, params: BeamSearchParams):
        limits = engine.admission.limits
        max_logprobs = limits.vocab_size if limits.max_logprobs == -1 else limits.max_logprobs
        if 2 * params.beam_width > max_logprobs:
            raise RequestError(
                f"beam_width={params.beam_width} requires max_logprobs of at least {2 * params.beam_width}; this "
                f"engine has max_logprobs={max_logprobs}",
                parameter="beam_width",
                value=params.beam_width,
            )
        self._engine = engine
        self._run = run
        self._params = params
        self._max_model_len = limits.max_model_len
        self._eos_ids = frozenset(() if params.ignore_eos else limits.eos_token_ids)

    def run(
        self, prompts: list[Request], use_tqdm: bool = False, concurrency_limit: int | None = None
    ) -> list[BeamSearchOutput]:
        """Return up to ``beam_width`` sequences per prompt, best first.

        Args:
            prompts: The prompts.
            use_tqdm: Whether to show a progress bar.
            concurrency_limit: Most prompts to search at a time; None for no limit.

        Raises:
            RequestError: A prompt is invalid; the message names its index.
        """
        searches = self._start(prompts)
        size = concurrency_limit or max(len(searches), 1)
        total = len(searches) * self._params.max_tokens
        with tqdm(total=total, desc="Beam search", unit="token", disable=not use_tqdm) as bar:
            for first in range(0, len(searches), size):
                group = searches[first : first + size]
                for _ in range(self._params.max_tokens):
                    has_beams = self._advance(group)
                    bar.update(len(group))
                    if not has_beams:
                        break
        return [self._result(search) for search in searches]

    def _start(self, prompts: list[Request]) -> list[_Search]:
        """Create one search per prompt."""
        searches = []
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        for index, prompt in enumerate(prompts):
            try:
                request = self._engine.prepare(dataclasses.replace(prompt, params=params))
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from error
            searches.append(_Search(prompt, [BeamSearchSequence(tokens=request.prompt_token_ids, logprobs=[])]))
        return searches

    def _advance(self, searches: list[_Search]) -> bool:
        """Extend every beam by one token; return whether any beam is left."""
        beams = [(search, beam) for search in searches for beam in search.beams]
        outputs = self._run([self._request(search.prompt, beam) for search, beam in beams])
        for search in searches:
            search.beams = []
        for (search, beam), output in zip(beams, outputs, strict=True):
            self._extend(search, beam, output)
        for search in searches:
            search.beams.sort(key=self._score, reverse=True)
            del search.beams[self._params.beam_width :]
            full = [beam for beam in search.beams if len(beam.tokens) >= self._max_model_len]
            search.completed += [dataclasses.replace(beam, finish_reason="length") for beam in full]
            search.beams = [beam for beam in search.beams if len(beam.tokens) < self._max_model_len]
        return any(search.beams for search in searches)

    def _result(self, search: _Search) -> BeamSearchOutput:
        """Return the best sequences of a search, best first."""
        cut = [dataclasses.replace(beam, finish_reason="length") for beam in search.beams]
        best = sorted(search.completed + cut, key=self._score, reverse=True)[: self._params.beam_width]
        tokenizer = self._engine.tokenizer
        if tokenizer is not None:
            best = [
                dataclasses.replace(beam, text=tokenizer.decode(beam.tokens, self._params.skip_special_tokens))
                for beam in best
            ]
        return BeamSearchOutput(sequences=best)

    def _request(self, prompt: Request, beam: BeamSearchSequence) -> Request:
        params = SamplingParams(
            temperature=self._params.temperature,
            logprobs=2 * self._params.beam_width,
            max_tokens=1,
            ignore_eos=True,
            seed=0,
        )
        return dataclasses.replace(prompt, token_ids=tuple(beam.tokens), params=params)

    def _extend(self, search: _Search, beam: BeamSearchSequence, output: RequestOutput) -> None:
        """Add one extension of a beam for each reported token to the search."""
        logprobs = output.outputs[0].logprobs
        if output.error is not None:
            raise RequestError(f"beam search: {output.error}")
        assert logprobs is not None
        position: dict[int, Logprob] = logprobs[0]
        for token, logprob in position.items():
            ends = token in self._eos_ids
            keeps = not ends or self._params.include_stop_str_in_output
            longer = BeamSearchSequence(
                tokens=[*beam.tokens, token] if keeps else beam.tokens,
                logprobs=[*beam.logprobs, position],
                cum_logprob=beam.cum_logprob + logprob.logprob,
                finish_reason="stop" if ends else None,
            )
            (search.completed if ends else search.beams).append(longer)

    def _score(self, beam: BeamSearchSequence) -> float:
        """Return the logprob divided by length ** length_penalty, without counting an end-of-sequence token."""
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos_ids)
        return beam.cum_logprob / max(length, 1) ** self._params.length_penalty
