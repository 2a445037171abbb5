"""The one place where a request is checked against the model, fitted to its context, and made into sequences."""

import collections.abc
import concurrent.futures
import hashlib
import time
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.engine.model_limits import ModelLimits
from jaxserve.engine.pooling import pooling_state
from jaxserve.engine.request_state import RequestState, Sample
from jaxserve.errors import RequestError
from jaxserve.logprobs import FlatLogprobs, Logprob, SampleLogprobs
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import PromptFit, PromptInput, check_length
from jaxserve.sampling_options import SAMPLING_OPTIONS, OptionValues
from jaxserve.sampling_params import SamplingParams, check_against
from jaxserve.scheduling.plan import Sampling
from jaxserve.scheduling.sequence import Constraint, Sequence
from jaxserve.structured_output.constraints import AllOf, BadWords, ThinkingBudget, bad_word_ids
from jaxserve.structured_output.grammars import CompiledLater, Grammar, GrammarCompiler
from jaxserve.structured_output.reasoning import AfterReasoning, Reasoning, find_reasoning
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer


def truncated(token_ids: list[int], fit: PromptFit, max_output_tokens: int | None, max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt, truncated as its ``fit`` says.

    Args:
        token_ids: All of them.
        fit: What is asked for.
        max_output_tokens: Output tokens that must fit after the prompt; None: one.
        max_model_len: Longest context.

    Raises:
        RequestError: Fewer than one token, or more than a context holds.
    """
    kept = fit.truncate_prompt_tokens
    if kept is None:
        return token_ids
    if kept == -1:
        kept = max_model_len - (1 if max_output_tokens is None else max_output_tokens)
        return token_ids[-kept:] if kept > 0 else token_ids
    if not 1 <= kept <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1, or from 1 to the model's maximum context length of {max_model_len}",
            parameter="truncate_prompt_tokens",
            value=kept,
        )
    return token_ids[-kept:]


def fitted(params: SamplingParams, num_prompt_tokens: int, max_model_len: int, is_strict: bool) -> SamplingParams:
    """The parameters with a ``max_tokens`` that the context holds.

    Args:
        params: As given.
        num_prompt_tokens: Length of the prompt.
        max_model_len: Longest context.
        is_strict: Refuse a ``max_tokens`` that it does not hold; else cut it.

    Raises:
        RequestError: The prompt leaves no room for a token, or less than it must.
    """
    room = max_model_len - num_prompt_tokens
    check_length(num_prompt_tokens, (params.max_tokens or 1) if is_strict else 1, max_model_len)
    if params.max_tokens is None or params.max_tokens > room:
        return params.clone(max_tokens=room, min_tokens=min(params.min_tokens, room))
    return params


def stream_seed(seed: int, index: int) -> int:
    """A 32-bit seed for sample ``index`` of a request, unlike those of other seeds and samples."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def make_sampling(
    params: SamplingParams,
    *,
    seed: int,
    vocab_size: int,
    arguments: Mapping[str, float],
    banned_ids: collections.abc.Sequence[int],
    banned_until: int,
    bad_ids: collections.abc.Sequence[int],
) -> Sampling:
    """The numbers of one sample.

    Args:
        params: What the request asks for, checked.
        seed: The sample's own, 32 bits.
        vocab_size: Token ids are below it.
        arguments: What the engine's logits processors read, with the values that change nothing.
        banned_ids: Tokens not allowed before ``min_tokens``.
        banned_until: Position of the first token that may be one of them.
        bad_ids: Tokens never allowed.
    """
    return Sampling(
        options=OptionValues(**{name: getattr(params, name) for name in SAMPLING_OPTIONS}),
        seed=seed,
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
    """Numbers for the logits processors; none where the request has none of its own."""
    given = params.extra_args
    return tuple(float(given.get(name, default)) for name, default in defaults.items()) if given else ()


class Admission:
    """Makes requests: checks them, tokenizes them, starts to compile their grammars. Any thread may use it.

    Args:
        limits: What a request must keep to.
        tokenizer: None where the model has none; requests then bring token ids and get no text.
        grammars: Compiles structured outputs; None where the model has no tokenizer.
    """

    def __init__(self, limits: ModelLimits, tokenizer: Tokenizer | None, grammars: GrammarCompiler | None):
        self.limits = limits
        self.tokenizer = tokenizer
        self.grammars = grammars

    def admit(
        self,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams,
        *,
        request_id: str,
        priority: int,
        default_seed: int,
        arrival_s: float,
    ) -> RequestState:
        """The state of a new request.

        Args:
            prompt: Text or token ids.
            params: How to sample, or how to pool in place of it.
            request_id: Its name.
            priority: Lower runs sooner; must be 0 unless the scheduler goes by it.
            default_seed: Used where the parameters bring no seed.
            arrival_s: When it came, in seconds of ``time.monotonic()``.

        Raises:
            RequestError: No token ids, a token id out of the vocabulary, more tokens than a context can hold, or a
                parameter that this model or engine cannot serve.
        """
        limits = self.limits
        limits.check_priority(priority)
        max_output_tokens = params.max_tokens if isinstance(params, SamplingParams) else 0
        token_ids = truncated(self._token_ids(prompt), prompt.fit, max_output_tokens, limits.max_model_len)
        if isinstance(params, PoolingParams):
            times = {"arrival_s": arrival_s, "queued_s": time.monotonic()}
            return pooling_state(prompt, token_ids, params, limits, request_id=request_id, priority=priority, **times)
        check_against(params, vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        params = fitted(params, len(token_ids), limits.max_model_len, prompt.fit.is_strict)
        self._check_text(params)
        grammar = reasoning = None
        if params.structured_outputs is not None:
            assert self.grammars is not None and self.tokenizer is not None
            grammar = self.grammars.submit(params.structured_outputs)
            if limits.reasoning is not None:
                reasoning = find_reasoning(limits.reasoning, self.tokenizer, token_ids, prompt.is_chat)
        root = limits.cache_root(prompt.cache_salt, request_id, len(token_ids) + (params.max_tokens or 0))
        seed = default_seed if params.seed is None else params.seed
        facts = _SampleFacts(request_id, token_ids, params, seed, priority, root, grammar, reasoning)
        return RequestState(
            request_id=request_id,
            prompt=prompt.prompt,
            prompt_token_ids=token_ids,
            params=params,
            samples=self._samples(facts),
            replica=0,
            arrival_s=arrival_s,
            queued_s=time.monotonic(),
            prompt_logprobs=_no_prompt_logprobs(params, len(token_ids)),
            grammar=grammar,
        )

    def _samples(self, facts: "_SampleFacts") -> list[Sample]:
        """Make the samples of a request; the first leads the others, which share the pages of its prompt."""
        prompt, params = facts.prompt, facts.params
        bad_words = bad_word_ids(self.tokenizer, params.bad_words) if self.tokenizer and params.bad_words else []
        followers = [self._sequence(facts, index, bad_words, []) for index in range(1, params.n)]
        return [
            Sample(index, sequence, self._detokenizer(prompt, params), _no_logprobs(params))
            for index, sequence in enumerate([self._sequence(facts, 0, bad_words, followers), *followers])
        ]

    def _token_ids(self, prompt: PromptInput) -> list[int]:
        if prompt.prompt_token_ids is not None:
            token_ids = list(prompt.prompt_token_ids)
        elif self.tokenizer is None:
            raise RequestError("the model directory has no tokenizer; expected prompt_token_ids, got text")
        else:
            token_ids = self.tokenizer.encode(prompt.prompt or "", prompt.fit.add_special_tokens)
        if not token_ids:
            raise RequestError(
                "the prompt has no token ids after tokenization; at least one is needed", parameter="prompt"
            )
        largest = max(token_ids)
        if largest >= self.limits.vocab_size:
            expected = f"expected ids from 0 to {self.limits.vocab_size - 1}"
            raise RequestError(f"token id {largest} is out of vocabulary; {expected}", parameter="prompt")
        return token_ids

    def _check_text(self, params: SamplingParams) -> None:
        """Refuses what needs a tokenizer or a parser that the engine does not have, and unknown extra arguments."""
        if self.tokenizer is None:
            names = {"stop": "stop strings", "bad_words": "bad words", "structured_outputs": "structured outputs"}
            for name, what in names.items():
                if getattr(params, name):
                    raise RequestError(f"{what} need text; the model directory has no tokenizer", parameter=name)
        if params.thinking_token_budget is not None and self.limits.reasoning is None:
            message = "thinking_token_budget needs an engine with a reasoning_parser and a tokenizer"
            raise RequestError(message, parameter="thinking_token_budget", value=params.thinking_token_budget)
        for name, value in (params.extra_args or {}).items():
            if name not in self.limits.arguments:
                nothing = "nothing: the engine has no logits_processors with arguments"
                known = ", ".join(self.limits.arguments) or nothing
                raise RequestError(f"extra_args has no argument {name!r}; there is {known}", parameter="extra_args")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RequestError(f"extra_args[{name!r}] must be a number, got {value!r}", parameter="extra_args")

    def _sequence(
        self, facts: "_SampleFacts", index: int, bad_words: list[tuple[int, ...]], followers: list[Sequence]
    ) -> Sequence:
        prompt, params = facts.prompt, facts.params
        stop_ids: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(self.limits.eos_token_ids)
        stop_ids |= {token: token for token in params.stop_token_ids or ()}
        sampling = make_sampling(
            params,
            seed=stream_seed(facts.seed, index),
            vocab_size=self.limits.vocab_size,
            arguments=self.limits.arguments,
            banned_ids=[token for token in stop_ids if token < self.limits.vocab_size],
            banned_until=len(prompt) + params.min_tokens,
            bad_ids=[word[0] for word in bad_words if len(word) == 1],
        )
        return Sequence(
            sequence_id=f"{facts.request_id}-{index}",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_length=len(prompt) + (params.max_tokens or 0),
            sampling=sampling,
            stop_ids=stop_ids,
            min_length=len(prompt) + params.min_tokens,
            wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
            priority=facts.priority,
            cache_root=facts.cache_root,
            reads_cache=params.reads_prefix_cache or (index > 0 and params.skip_reading_prefix_cache is None),
            constraint=self._constraint(facts, bad_words),
            repetition=params.repetition_detection,
            followers=followers,
        )

    def _constraint(self, facts: "_SampleFacts", bad_words: list[tuple[int, ...]]) -> Constraint | None:
        """Make the constraint of one sample; where no token satisfies all of its parts, the grammar comes first."""
        own = self._own_constraint(facts.prompt, facts.params, bad_words)
        if facts.grammar is None:
            return own
        rule: Constraint = CompiledLater(facts.grammar)
        if facts.reasoning is not None:
            rule = AfterReasoning(rule, facts.reasoning)
        return rule if own is None else AllOf([rule, own])

    def _own_constraint(
        self, prompt: list[int], params: SamplingParams, bad_words: list[tuple[int, ...]]
    ) -> Constraint | None:
        """Make the constraint of the thinking budget and of bad words of several tokens."""
        found: list[Constraint] = []
        marks, budget = self.limits.reasoning, params.thinking_token_budget
        if marks is not None and budget is not None:
            vocab_size = self.limits.vocab_size
            found.append(ThinkingBudget(marks.start_ids, marks.end_ids, budget, prompt, vocab_size=vocab_size))
        longer = [word for word in bad_words if len(word) > 1]
        if longer:
            found.append(BadWords(longer, vocab_size=self.limits.vocab_size))
        return AllOf(found) if len(found) > 1 else found[0] if found else None

    def _detokenizer(self, prompt: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer.pieces(params.skip_special_tokens),
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            prompt_token_ids=prompt,
        )


class _SampleFacts(NamedTuple):
    """What the samples of a request have in common; ``seed`` is the request's own."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    priority: int
    cache_root: bytes
    grammar: concurrent.futures.Future[Grammar] | None
    reasoning: Reasoning | None


def _no_logprobs(params: SamplingParams) -> SampleLogprobs | None:
    if params.logprobs is None and not params.logprob_token_ids:
        return None
    return FlatLogprobs() if params.flat_logprobs else []


def _no_prompt_logprobs(params: SamplingParams, num_tokens: int) -> list[dict[int, Logprob] | None] | None:
    return None if params.prompt_logprobs is None else [None for _ in range(num_tokens)]
