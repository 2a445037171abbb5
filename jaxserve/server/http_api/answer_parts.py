"""Parts that the answers of several routes have: what they begin with, usage, and chunks of a stream."""

import hashlib
import importlib.metadata
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxserve.outputs import RequestOutput
from jaxserve.server.frontend import Frontend, new_request_id
from jaxserve.server.http_api.json_body import json_text

VERSION = importlib.metadata.version("jaxserve")


def answer_head(frontend: Frontend, prefix: str, kind: str, model: str | None) -> dict[str, Any]:
    """What an answer begins with: a new id, its kind, when it was made, the model, and what ran it.

    Args:
        frontend: The front end.
        prefix: Of the id, such as ``cmpl``.
        kind: ``object`` of the answer.
        model: The name that the request uses, if any.

    Raises:
        UnknownModelError: There is no model of that name.
    """
    frontend.check_model(model)
    digest = hashlib.sha256(frontend.info.model.SerializeToString(deterministic=True)).hexdigest()
    return {
        "id": new_request_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": frontend.model_names[0],
        "system_fingerprint": f"jaxserve-{VERSION}-{digest[:8]}",
    }


class Chunks:
    """Writes the chunks of one stream.

    Args:
        head: What each begins with.
    """

    def __init__(self, head: dict[str, Any]):
        self._begin = f"data: {json_text(head)[:-1]}"

    def event(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """A chunk as an event."""
        used = "" if usage is None else f',"usage":{json_text(usage)}'
        ids = "" if prompt_token_ids is None else f',"prompt_token_ids":{json_text(list(prompt_token_ids))}'
        return f'{self._begin},"choices":{json_text(choices)}{used}{ids}}}\n\n'.encode("utf-8", "replace")


class Usage:
    """Counts the tokens of a request's prompts and texts.

    Args:
        has_details: Whether it tells how many tokens the prefix cache had.
    """

    def __init__(self, has_details: bool):
        self._has_details = has_details
        self._num_prompt: dict[int, int] = {}
        self._num_generated: Counter[tuple[int, int]] = Counter()
        self._num_cached = 0

    def note(self, place: int, output: RequestOutput, *, counts_texts: bool = True) -> None:
        """Takes in an output of the prompt at ``place``: what is new of it."""
        if place not in self._num_prompt:
            self._num_prompt[place] = len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens or 0
        if counts_texts:
            for one in output.outputs:
                self._num_generated[place, one.index] += len(one.token_ids)

    def note_prompt(self, place: int, num_tokens: int) -> None:
        """Takes in the prompt at ``place``, for which nothing is generated."""
        self._num_prompt[place] = num_tokens

    def as_object(self) -> dict[str, Any]:
        """The numbers of all prompts and texts so far."""
        found = _counts(sum(self._num_prompt.values()), self._num_generated.total())
        if self._has_details:
            found["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
        return found

    def of_text(self, place: int, index: int, *, is_empty: bool = False) -> dict[str, Any]:
        """The numbers so far of one text of the prompt at ``place``, and of that; ``is_empty`` leaves the text out."""
        return _counts(self._num_prompt[place], 0 if is_empty else self._num_generated[place, index])


def _counts(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_generated,
        "completion_tokens": num_generated,
    }
