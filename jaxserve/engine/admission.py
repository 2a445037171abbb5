"""Validate requests against the model, fit them to its context length, and create their sequences."""

import collections.abc
import concurrent.futures
import dataclasses
import hashlib
import time
from collections.abc import Mapping

from jaxserve.api.errors import RequestError
from jaxserve.api.logprobs import FlatLogprobs
from jaxserve.api.packed_logprobs import PackedLogprobs
from jaxserve.api.request import Request, check_length
from jaxserve.api.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.api.sampling_params import SamplingParams, check_against
from jaxserve.api.text_bound import check_text
from jaxserve.api.turns import Turn
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.pooling import pooling_state
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.scheduling.plan import Sampling
from jaxserve.scheduling.repetition import RepetitionSearch
from jaxserve.scheduling.sequence import Constraint, Sequence
from jaxserve.structured_output.constraints import AllOf, BadWords, ThinkingBudget, bad_word_ids, separate
from jaxserve.structured_output.grammar_constraint import DeferredConstraint, Grammar
from jaxserve.structured_output.grammars import GrammarCompiler
from jaxserve.structured_output.reasoning import AfterReasoning, Reasoning, find_reasoning, open_section
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.generation_prompt import count_generation_tokens
from jaxserve.text.text_offsets import TextOffsets, prompt_offsets
from jaxserve.text.token_pieces import TokenPieces
from jaxserve.text.tokenizer import Tokenizer

GrammarFuture = concurrent.futures.Future[Grammar]


def truncate_prompt(token_ids: list[int], kept: int, max_output_tokens: int | None, max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt.

    Args:
        token_ids: Tokens of the prompt.
        kept: Number of tokens to keep; -1: as many as leave room for the output.
        max_output_tokens: For -1, the number of output tokens to leave room for; None for one.
        max_model_len: Maximum context length in tokens.

    Raises:
        RequestError: ``truncate_prompt_tokens`` is neither -1 nor from 1 to ``max_model_len``.
    """
    if kept == -1:
        kept = max_model_len - (1 if max_output_tokens is None else max_output_tokens)
        return token_ids[-kept:] if kept > 0 else token_ids
    if not 1 <= kept <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1, or between 1 and max_model_len={max_model_len}",
            parameter="truncate_prompt_tokens",
            value=kept,
        )
    return token_ids[-kept:]


def fit_max_tokens(
    params: SamplingParams, num_prompt_tokens: int, max_model_len: int, is_strict: bool
) -> SamplingParams:
    """Return the parameters with a ``max_tokens`` that fits into the context.

    Args:
        params: Parameters of the request.
        num_prompt_tokens: Length of the prompt.
        max_model_len: Maximum context length in tokens.
        is_strict: Whether to reject a ``max_tokens`` that does not fit rather than reduce it.

    Raises:
        RequestError: The context has no room for a token after the prompt or, if strict, for ``max_tokens``.
    """
    room = max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens <= room:
        return params
    check_length(num_prompt_tokens, (params.max_tokens or 1) if is_strict else 1, max_model_len)
    return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))


def sample_seed(seed: int, index: int) -> int:
    """Derive the 32-bit seed of sample ``index`` from the seed of its request."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def make_sampling(
    params: SamplingParams,
    *,
    vocab_size: int,
    arguments: Mapping[str, float],
    banned_ids: collections.abc.Sequence[int],
    banned_until: int,
    bad_ids: collections.abc.Sequence[int],
) -> Sampling:
    """Return the sampler's parameters for a request's samples, which differ in their seeds.

    Args:
        params: Validated parameters of the request.
        vocab_size: Vocabulary size.
        arguments: Names and default values of the logits processors' arguments.
        banned_ids: Tokens not allowed before ``banned_until``; used if ``min_tokens`` is set.
        banned_until: First position at which ``banned_ids`` are allowed.
        bad_ids: Tokens never allowed.
    """
    options = OptionValues(**{name: getattr(params, name) for name in SAMPLING_OPTIONS})
    if params.is_plain:
        return Sampling(options)
    return Sampling(
        options,
        num_logprobs=_num_logprobs(params, vocab_size),
        banned_ids=tuple(banned_ids) if params.min_tokens else (),
        banned_until=banned_until,
        bad_ids=tuple(bad_ids),
        allowed_ids=None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
        logit_bias=tuple((params.logit_bias or {}).items()),
        tracked_ids=tuple(params.logprob_token_ids or ()),
        arguments=_arguments(params, arguments),
    )


def _num_logprobs(params: SamplingParams, vocab_size: int) -> int:
    if params.logprob_token_ids is not None:
        return 0
    if params.logprobs is None:
        return -1
    return vocab_size if params.logprobs == -1 else params.logprobs


def _arguments(params: SamplingParams, defaults: Mapping[str, float]) -> tuple[float, ...]:
    """Return the logits processors' arguments; empty if the request has no ``extra_args``."""
    given = params.extra_args
    return tuple(float(given.get(name, default)) for name, default in defaults.items()) if given else ()


class Admission:
    """Validates and tokenizes requests, and starts to compile their grammars. Thread-safe.

    Args:
        limits: Limits of the model and the engine.
        tokenizer: None if the model has none; then prompts must be token ids, and outputs have no text.
        grammars: Compiler for structured outputs; None without a tokenizer.
    """

    def __init__(self, limits: ModelLimits, tokenizer: Tokenizer | None, grammars: GrammarCompiler | None):
        self.limits = limits
        self.tokenizer = tokenizer
        self.grammars = grammars

    def admit(self, request: Request, *, default_seed: int, arrival_s: float) -> RequestState:
        """Create the state of a new request.

        Args:
            request: The request, which has a name.
            default_seed: Seed to use if the parameters have none.
            arrival_s: Arrival time in seconds of ``time.monotonic()``.

        Raises:
            RequestError: The prompt is empty, too long or has a token id out of the vocabulary, or this model or engine
                does not support a parameter.
        """
        limits, params = self.limits, request.params
        if request.priority:
            limits.check_priority(request.priority)
        token_ids = self._token_ids(request)
        if request.truncate_prompt_tokens is not None:
            max_output_tokens = params.max_tokens if request.pooling is None else 0
            kept = request.truncate_prompt_tokens
            token_ids = truncate_prompt(token_ids, kept, max_output_tokens, limits.max_model_len)
        if request.pooling is not None:
            times = {"arrival_s": arrival_s, "queued_s": time.monotonic()}
            return pooling_state(request, request.pooling, token_ids, limits, **times)
        limits.check_generates()
        params = fit_max_tokens(params, len(token_ids), limits.max_model_len, request.is_strict_length)
        grammar = None
        if not params.is_plain:
            params = limits.fit_logprobs(params, len(token_ids), request.is_strict_length)
            grammar = self._check_features(params, request.turn)
        if params is not request.params:
            request = dataclasses.replace(request, params=params)
        tokenizer = self.tokenizer if params.detokenize else None
        samples = self._samples(request, token_ids, tokenizer, default_seed, grammar)
        state = RequestState(request, token_ids, samples, arrival_s, time.monotonic(), tokenizer, grammar=grammar)
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = PackedLogprobs.empty()
            if tokenizer is not None:  # in the given text, or in the tokens' own if it may have been truncated
                text = request.text if request.truncate_prompt_tokens is None else None
                state.prompt_offsets = prompt_offsets(tokenizer, text, token_ids)
        return state

    def _samples(
        self,
        request: Request,
        prompt: list[int],
        tokenizer: Tokenizer | None,
        default_seed: int,
        grammar: GrammarFuture | None,
    ) -> list[Sample]:
        """Create the samples of a request; the others follow the first one, whose prompt pages they share."""
        params, limits = request.params, self.limits
        stop_ids: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(limits.eos_token_ids)
        bad_words, constraints = list[tuple[int, ...]](), list[Constraint | None]([None] * params.n)
        if not params.is_plain:
            stop_ids |= {token: token for token in params.stop_token_ids or ()}
            bad_words = self._bad_words(params.bad_words or ())
            constraints = self._constraints(request, prompt, grammar, bad_words)
        max_length = len(prompt) + (params.max_tokens or 0)
        cache_root = limits.cache_root(request.cache_salt, request.request_id, max_length)
        sampling = make_sampling(
            params,
            vocab_size=limits.vocab_size,
            arguments=limits.arguments,
            banned_ids=[token for token in stop_ids if 0 <= token < limits.vocab_size],
            banned_until=len(prompt) + params.min_tokens,
            bad_ids=[word[0] for word in bad_words if len(word) == 1],
        )
        seed = default_seed if params.seed is None else params.seed
        begins_with = request.generation_prompt  # of a rendered chat, where the model has states
        num_generation_tokens = -1 if begins_with is None else self._num_generation_tokens(request, begins_with, prompt)
        samples: list[Sample] = []
        pieces = None if tokenizer is None else tokenizer.pieces(params.skip_special_tokens)
        for index, constraint in enumerate(constraints):
            detokenizer = None if pieces is None else _detokenizer(pieces, params, prompt)
            sequence = Sequence(
                request,
                prompt,
                len(prompt),
                max_length=max_length,
                shares_prompt=True,
                index=index,
                sampling=sampling._replace(seed=sample_seed(seed, index)),
                stop_ids=stop_ids,
                cache_root=cache_root,
                reads_cache=params.reads_prefix_cache or (index > 0 and params.skip_reading_prefix_cache is None),
                constraint=constraint,
                stop_strings=detokenizer if params.stop_strings else None,
                num_generation_tokens=num_generation_tokens,
                repetition=None
                if params.repetition_detection is None
                else RepetitionSearch(params.repetition_detection),
            )
            samples.append(Sample(sequence, detokenizer, draft_report=self.limits.draft_report))
            if params.logprobs is not None or params.logprob_token_ids:
                samples[-1].logprobs = FlatLogprobs() if params.flat_logprobs else []
                samples[-1].offsets = None if pieces is None else TextOffsets(pieces, prompt)
        first, *others = [sample.sequence for sample in samples]
        first.followers = others
        return samples

    def _bad_words(self, words: collections.abc.Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token sequences of bad words; a tokenizer may have tokens that the model lacks."""
        if not words:
            return []
        assert self.tokenizer is not None
        found = bad_word_ids(self.tokenizer, words)
        outside = [token for word in found for token in word if not 0 <= token < self.limits.vocab_size]
        if outside:
            texts = ", ".join(f"{token} ({self.tokenizer.token_text(token)!r})" for token in dict.fromkeys(outside))
            message = f"bad_words must consist of the model's tokens, 0 to {self.limits.vocab_size - 1}; got {texts}"
            raise RequestError(message, parameter="bad_words", value=words)
        return found

    def _num_generation_tokens(self, request: Request, generation_prompt: str, token_ids: list[int]) -> int:
        """Return how many tokens of a rendered prompt begin the answer; -1 if that is not known."""
        if self.tokenizer is None or request.text is None:
            return -1
        return count_generation_tokens(self.tokenizer.encode, request.text, token_ids, generation_prompt)

    def _token_ids(self, request: Request) -> list[int]:
        if request.token_ids is not None:
            token_ids = list(request.token_ids)
        elif self.tokenizer is None:
            raise RequestError("the model directory has no tokenizer; expected prompt_token_ids, got text")
        else:
            check_text(self.tokenizer.text_bound, request, self.limits.max_model_len)
            token_ids = self.tokenizer.encode(request.text or "", request.add_special_tokens)
        if not token_ids:
            raise RequestError(
                "the prompt is empty after tokenization; at least one token is required", parameter="prompt"
            )
        largest = max(token_ids)
        if largest >= self.limits.vocab_size:
            expected = f"expected ids from 0 to {self.limits.vocab_size - 1}"
            raise RequestError(f"token id {largest} is out of vocabulary; {expected}", parameter="prompt")
        return token_ids

    def _check_features(self, params: SamplingParams, turn: Turn) -> GrammarFuture | None:
        """Check parameters that are not plain, and start to compile the grammar if there is one.

        Raises:
            RequestError: A feature needs a tokenizer or parser that the engine lacks, or exceeds its limits.
        """
        check_against(params, vocab_size=self.limits.vocab_size, max_logprobs=self.limits.max_logprobs)
        self._check_supported(params)
        if params.structured_outputs is None:
            return None
        assert self.grammars is not None
        return self.grammars.submit(params.structured_outputs, turn)

    def _check_supported(self, params: SamplingParams) -> None:
        """Reject parameters that need a tokenizer or parser that the engine lacks, and invalid ``extra_args``."""
        if self.tokenizer is None:
            names = {"stop": "stop strings", "bad_words": "bad words", "structured_outputs": "structured outputs"}
            for name, feature in names.items():
                if getattr(params, name):
                    raise RequestError(f"{feature} require a tokenizer; the model has none", parameter=name)
        if params.thinking_token_budget is not None and self.limits.reasoning is None:
            message = (
                "thinking_token_budget requires an engine with a reasoning_parser and a tokenizer that spells the "
                "parser's markers with tokens of the model"
            )
            raise RequestError(message, parameter="thinking_token_budget", value=params.thinking_token_budget)
        for name, value in (params.extra_args or {}).items():
            if name not in self.limits.arguments:
                known = ", ".join(self.limits.arguments) or "none"
                message = f"unknown argument {name!r} in extra_args; arguments of the logits_processors: {known}"
                raise RequestError(message, parameter="extra_args")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"extra_args[{name!r}] must be a number, got {value!r}", parameter="extra_args")

    def _constraints(
        self, request: Request, prompt: list[int], grammar: GrammarFuture | None, bad_words: list[tuple[int, ...]]
    ) -> list[Constraint | None]:
        """Create the constraint of each sample; the grammar takes precedence if no token satisfies all parts."""
        budget = request.params.thinking_token_budget
        longer = [word for word in bad_words if len(word) > 1]
        if grammar is None and budget is None and not longer:
            return [None] * request.params.n
        markers, vocab_size = self.limits.reasoning, self.limits.vocab_size
        reasoning: Reasoning | None = None
        section: collections.abc.Sequence[int] = ()
        text_of = None if self.tokenizer is None else self.tokenizer.pieces(skip_special_tokens=False).shown
        if markers is not None and self.tokenizer is not None and (grammar is not None or budget is not None):
            ending = (markers, self.tokenizer, prompt, request.chat is not None, request.last_message)
            reasoning = None if grammar is None else find_reasoning(*ending)
            section = () if budget is None else open_section(*ending)

        parts: list[BadWords | ThinkingBudget] = []
        if markers is not None and budget is not None and text_of is not None:
            parts.append(ThinkingBudget(markers.texts, markers.end_ids, budget, section, vocab_size, text_of))
        if longer:
            parts.append(BadWords(longer, vocab_size=vocab_size))

        def make() -> Constraint:
            own: list[Constraint] = [separate(part) for part in parts]
            if grammar is not None:
                constraint: Constraint = DeferredConstraint(grammar)
                if reasoning is not None and text_of is not None:
                    constraint = AfterReasoning(constraint, reasoning, text_of)
                own = [constraint, AllOf(own) if len(own) > 1 else own[0]] if own else [constraint]
            return AllOf(own) if len(own) > 1 else own[0]

        return [make() for _ in range(request.params.n)]


def _detokenizer(pieces: TokenPieces, params: SamplingParams, prompt: list[int]) -> Detokenizer:
    return Detokenizer(
        pieces,
        stop=params.stop_strings,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        prompt_token_ids=prompt,
    )
