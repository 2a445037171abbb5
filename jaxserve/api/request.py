"""A request, as every API makes it and as it travels to the engine; and the prompts that users write.

`SamplingParams` is in `jaxserve.api.sampling_params`, results are in `jaxserve.api.outputs`.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from jaxserve.api.chat_messages import LastMessage, last_message
from jaxserve.api.errors import RequestError
from jaxserve.api.field_checks import integer, sequence, unicode_text
from jaxserve.api.pooling_params import PoolingParams
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.turns import SHARED_TURN, Turn

PROMPT_FORMS = "a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
MAX_PRIORITY = 2**63 - 1
Params = TypeVar("Params", bound=SamplingParams | PoolingParams)
_DEFAULTS = SamplingParams()
_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and what to do with it.

    The prompt is `text` to be tokenized, `token_ids`, with their text if it is known, or a conversation, `chat`; a
    rendered conversation has all three.

    Attributes:
      request_id: Its name, for aborts and logs; if empty, the engine gives it one.
      text: Text. If there are token ids it is only returned.
      token_ids: Each is >= 0; the engine checks the upper bound.
      chat: Arguments of `AsyncLLM.chat`: `messages` (OpenAI's form) and, if given, `tools`, `chat_template`,
          `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`.
      params: How to sample.
      pooling: Pool hidden states instead of generating; `params` is then not read.
      priority: Lower runs sooner.
      cache_salt: Only requests with the same salt share cached pages.
      timeout_s: Seconds until the deadline; None for none.
      is_strict_length: Whether a `max_tokens` that exceeds the context is an error; else it is lowered.
      truncate_prompt_tokens: Keep only the last tokens of the prompt, this many; -1: as many as leave room for the
          output.
      add_special_tokens: Whether the tokenizer adds the model's special tokens to a text.
      turn: Whose turns it takes; a server sets it. Requests of different API keys are prepared and admitted in turns.
      stream_interval: Fewest tokens of a completion in a delta, except in its first and its last.
      generation_prompt: End of `text` with which a chat template begins the answer; None if it is not known. States of
          recurrent layers are kept before it, as the next turn may write it otherwise.

    Raises:
      RequestError: A wrong value; `SamplingParams` and `PoolingParams` have checked theirs.
    """

    request_id: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: Mapping[str, Any] | None = None
    params: SamplingParams = _DEFAULTS
    pooling: PoolingParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    is_strict_length: bool = False
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True
    stream_interval: int = 1
    generation_prompt: str | None = None
    turn: Turn = SHARED_TURN

    def __post_init__(self):
        if self.cache_salt == "":
            raise RequestError("cache_salt must not be empty", parameter="cache_salt", value="")
        if self.priority:
            integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        length = self.truncate_prompt_tokens
        if length is not None and integer("truncate_prompt_tokens", length, -1) == 0:
            message = "truncate_prompt_tokens must be at least 1, or -1 for as many as the context holds; got 0"
            raise RequestError(message, parameter="truncate_prompt_tokens", value=length)

    @property
    def last_message(self) -> LastMessage | None:
        """The last message of a conversation, which tells whether its end is the user's text or the assistant's."""
        if self.chat is None or not self.chat.get("messages"):
            return None
        return last_message(self.chat["messages"], continues=bool(self.chat.get("continue_final_message")))


def parse_prompts(
    prompts: Any, params: Any = None, default: SamplingParams | PoolingParams = _DEFAULTS, priority: Any = None
) -> list[Request]:
    """Read the arguments of `LLM.generate` and `LLM.embed`.

    Args:
      prompts: A string, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or a sequence of those.
        The dicts may also have `cache_salt`. An empty sequence means no prompts.
      params: Parameters of the class of `default` for all prompts, a sequence with one (or None) per prompt, or None.
      default: Parameters of prompts without any.
      priority: One number per prompt, or None; the lowest run first.

    Returns:
      One request per prompt, in order.

    Raises:
      RequestError: A prompt or priority is invalid (the message has its index), or there is another number of params
        or priorities than of prompts.
    """
    items = _items(prompts)
    all_params = params_for_each(params, len(items), default)
    priorities = priorities_for_each(priority, len(items))
    return [
        Request(**_parse(index, item), **_params_field(each), priority=level)
        for index, (item, each, level) in enumerate(zip(items, all_params, priorities, strict=True))
    ]


def parse_prompt(prompt: Any, params: Any = None, default: SamplingParams | PoolingParams = _DEFAULTS) -> Request:
    """Read the arguments of `AsyncLLM.generate` and `AsyncLLM.encode`: one prompt, as for `parse_prompts`."""
    requests = parse_prompts(prompt, params, default)
    if len(requests) != 1:
        name = "generate" if isinstance(default, SamplingParams) else "encode"
        raise RequestError(f"{name} takes one prompt, got {len(requests)}")
    return requests[0]


def params_for_each(params: Any, num_prompts: int, default: Params) -> list[Params]:
    """Return the parameters of each prompt, of the class of `default`, which is used for None.

    Raises:
      RequestError: A sequence of another length, or an item of another type.
    """
    kind = type(default)
    if params is None:
        return [default] * num_prompts
    if isinstance(params, kind):
        return [params] * num_prompts
    name = "sampling_params" if kind is SamplingParams else "pooling_params"
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise RequestError(f"{name} must be {kind.__name__} or a list of them, got {type(params).__name__}")
    listed = list(cast("Sequence[Any]", params))
    if len(listed) != num_prompts:
        message = f"the lengths of prompts ({num_prompts}) and {name} ({len(listed)}) must be the same"
        raise RequestError(message)
    for index, item in enumerate(listed):
        if item is not None and not isinstance(item, kind):
            raise RequestError(f"{name}[{index}] must be {kind.__name__}, got {type(item).__name__}")
    return [default if item is None else item for item in listed]


def check_length(num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> None:
    """Reject a prompt and output that together exceed the context.

    Args:
      num_prompt_tokens: Tokens of the prompt.
      num_output_tokens: Tokens to be generated; at least 1.
      max_model_len: Longest context in tokens.

    Raises:
      RequestError: The context is too short.
    """
    room = max_model_len - num_prompt_tokens
    if num_output_tokens <= room:
        return
    parameter, value = ("input_tokens", num_prompt_tokens) if room < 1 else ("max_tokens", num_output_tokens)
    raise RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_output_tokens} "
        f"output tokens and your prompt contains at least {num_prompt_tokens} input tokens, for a total of at least "
        f"{num_prompt_tokens + num_output_tokens} tokens. Please reduce the length of the input prompt or the number "
        "of requested output tokens.",
        parameter=parameter,
        value=value,
    )


def priorities_for_each(priority: Any, num_prompts: int) -> list[int]:
    """Return the priority of each prompt, 0 if None is given; the lowest run first.

    Raises:
      RequestError: Not a list, wrong length, or an item is not an int.
    """
    if priority is None:
        return [0] * num_prompts
    listed = sequence("priority", priority)
    if len(listed) != num_prompts:
        raise RequestError(f"the lengths of prompts ({num_prompts}) and priority ({len(listed)}) must be the same")
    return [integer(f"priority[{index}]", one, -MAX_PRIORITY, MAX_PRIORITY) for index, one in enumerate(listed)]


def _items(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be {PROMPT_FORMS}, or a list of those; got {type(prompts).__name__}")
    listed = list(cast("Sequence[Any]", prompts))
    if listed and isinstance(listed[0], numbers.Integral):
        return [listed]
    return listed


def _params_field(params: SamplingParams | PoolingParams) -> dict[str, Any]:
    return {"params": params} if isinstance(params, SamplingParams) else {"pooling": params}


def _parse(index: int, item: Any) -> dict[str, Any]:
    """Return the fields of a request that a prompt sets."""
    if isinstance(item, str):
        return {"text": unicode_text(f"prompt {index}", item)}
    if isinstance(item, Mapping):
        return _parse_mapping(index, cast("Mapping[str, Any]", item))
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return {"token_ids": _token_ids(index, cast("Sequence[Any]", item))}
    raise RequestError(f"prompt {index} must be {PROMPT_FORMS}; got {type(item).__name__}")


def _parse_mapping(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(item) - set(_KEYS), key=str)
    if unknown:
        known = ", ".join(map(repr, _KEYS))
        raise RequestError(f"prompt {index}: key {unknown[0]!r} is not supported; supported keys: {known}")
    text, token_ids = item.get("prompt"), item.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise RequestError(f"prompt {index}: the mapping has neither 'prompt' nor 'prompt_token_ids'")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt {index}: 'prompt' must be a string, got {type(text).__name__}")
    salt = _salt(index, item.get("cache_salt"))
    if token_ids is None:
        return {"text": unicode_text(f"prompt {index}", text or ""), "cache_salt": salt}
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        raise RequestError(f"prompt {index}: 'prompt_token_ids' must be a list of ints, got {type(token_ids).__name__}")
    return {"text": text, "token_ids": _token_ids(index, cast("Sequence[Any]", token_ids)), "cache_salt": salt}


def _salt(index: int, salt: Any) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(f"prompt {index}: 'cache_salt' must be a non-empty string, got {salt!r}")
    return unicode_text(f"prompt {index}", salt)


def _token_ids(index: int, token_ids: Sequence[Any]) -> tuple[int, ...]:
    if not token_ids:
        raise RequestError(f"prompt {index} has no token ids; at least one is required", parameter="prompt")
    if all(type(token_id) is int for token_id in token_ids):
        checked: tuple[int, ...] = tuple(token_ids)
    else:
        checked = tuple(_token_id(index, position, token_id) for position, token_id in enumerate(token_ids))
    if min(checked) < 0:
        raise RequestError(f"prompt {index}: token ids must be at least 0, got {min(checked)}", parameter="prompt")
    return checked


def _token_id(index: int, position: int, token_id: Any) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
        raise RequestError(f"prompt {index}: token id {position} must be an int, got {token_id!r}")
    return int(token_id)
