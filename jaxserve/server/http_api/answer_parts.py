"""Parts that the answers of several routes have: what they begin with, usage, and chunks of a stream."""

import hashlib
import importlib.metadata
import time
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
    name = frontend.check_model(model)
    digest = hashlib.sha256(frontend.info.model.SerializeToString(deterministic=True)).hexdigest()
    return {
        "id": new_request_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": f"jaxserve-{VERSION}-{digest[:8]}",
    }


class Chunks:
    """Writes the chunks of one stream.

    Args:
        head: What each begins with.
    """

    def __init__(self, head: dict[str, Any]):
        self._begin = f"data: {json_text(head)[:-1]}"

    def event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """A chunk as an event."""
        used = "" if usage is None else f',"usage":{json_text(usage)}'
        return f'{self._begin},"choices":{json_text(choices)}{used}}}\n\n'.encode("utf-8", "replace")


class Usage:
    """Counts the tokens of a request's prompts and texts.

    Args:
        has_details: Whether it tells how many tokens the prefix cache had.
    """

    def __init__(self, has_details: bool):
        self._has_details = has_details
        self._seen: set[int] = set()
        self._num_prompt = self._num_cached = self._num_generated = 0

    def note(self, place: int, output: RequestOutput, *, counts_texts: bool = True) -> None:
        """Takes in an output of the prompt at ``place``: what is new of it."""
        if place not in self._seen:
            self._seen.add(place)
            self._num_prompt += len(output.prompt_token_ids)
            self._num_cached += output.num_cached_tokens or 0
        if counts_texts:
            self._num_generated += sum(len(one.token_ids) for one in output.outputs)

    def note_prompt(self, num_tokens: int) -> None:
        """Takes in a prompt that nothing is generated for."""
        self._num_prompt += num_tokens

    def as_object(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The numbers so far; ``is_empty`` leaves the texts out."""
        generated = 0 if is_empty else self._num_generated
        found: dict[str, Any] = {
            "prompt_tokens": self._num_prompt,
            "total_tokens": self._num_prompt + generated,
            "completion_tokens": generated,
        }
        if self._has_details:
            found["prompt_tokens_details"] = {"cached_tokens": self._num_cached}
        return found
