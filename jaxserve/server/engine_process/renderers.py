"""The engine process' end of the processes that render conversations."""

import concurrent.futures
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.child_process import LineProcess
from jaxserve.errors import RequestError
from jaxserve.server.engine_process import renderer
from jaxserve.server.template_variables import check_variables
from jaxserve.text.chat import choose_template, split_conversations

logger = logging.getLogger(__name__)

_START_LIMIT_S = 60.0
_MEMORY_BYTES = 512 << 20
_NUM_WARM = 2
_MAX_PROCESSES = 4
_ARGUMENTS = ("messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")


class Renderer:
    """A process that renders one conversation after the other. Ends, and is of no more use, with one that is late.

    Args:
        limit_s: Seconds that a conversation may take.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._process = LineProcess(["-m", renderer.__name__])

    def start(self) -> None:
        """Waits until it can render.

        Raises:
            RuntimeError: It does not start.
        """
        setup = {"memory_bytes": _MEMORY_BYTES, "cpu_s": int(self._limit_s) + 1}
        if (self._ask(setup, _START_LIMIT_S) or {}).get("text") != renderer.READY:
            raise RuntimeError("the process that renders conversations did not start")

    def render(self, job: Mapping[str, Any]) -> str:
        """The prompt that a conversation becomes.

        Raises:
            RequestError: The template refuses it, is late, or takes too much memory.
        """
        answer = self._ask(job, self._limit_s)
        if answer is None:
            raise RequestError(f"the chat template failed: not done within {self._limit_s:g} s, or out of memory")
        if "error" in answer:
            raise RequestError(answer["error"])
        return answer["text"]

    def is_alive(self) -> bool:
        """Whether it can take another conversation."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Ends it at once, from any thread; a conversation in it fails."""
        self._process.kill()

    def close(self) -> None:
        """Ends it; not while another thread asks it something."""
        self._process.close()

    def _ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        """Its answer; None where it has ended, by itself or for being late."""
        answer = self._process.ask(json.dumps(dict(question)), limit_s)
        return None if answer is None else json.loads(answer)


class Renderers:
    """Some processes that render conversations, each on a thread that waits for it, and always a spare one.

    Args:
        limit_s: Seconds that a conversation may take.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._threads = concurrent.futures.ThreadPoolExecutor(_MAX_PROCESSES, "jaxserve-render")
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "jaxserve-renderer")
        self._idle: list[Renderer] = []
        self._all: list[Renderer] = []
        self._is_closed = False
        self._lock = threading.Lock()  # of the three above
        for _ in range(_NUM_WARM):
            self._starter.submit(self._add_spare)

    def submit(
        self, job: Mapping[str, Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> "concurrent.futures.Future[str]":
        """The text of a job that ``render_job`` made, as soon as it is rendered; fails as ``Renderer.render``.

        Args:
            job: The job.
            is_wanted: Asked when its turn comes; it is left out, with a ``CancelledError``, where it is not.
        """
        return self._threads.submit(self._render, job, is_wanted)

    def kill(self) -> None:
        """Ends all processes; what is being rendered fails. Does not wait."""
        with self._lock:
            self._is_closed = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        """Ends all processes and threads."""
        self.kill()
        self._threads.shutdown(cancel_futures=True)
        self._starter.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    def _render(self, job: Mapping[str, Any], is_wanted: Callable[[], bool]) -> str:
        if not is_wanted():
            raise concurrent.futures.CancelledError
        process = self._take()
        try:
            return process.render(job)
        finally:
            self._give_back(process)

    def _take(self) -> Renderer:
        with self._lock:
            while self._idle:
                found = self._idle.pop()
                if found.is_alive():
                    return found
        return self._started()

    def _give_back(self, process: Renderer) -> None:
        with self._lock:
            if process.is_alive() and len(self._idle) < _NUM_WARM:
                self._idle.append(process)
                return
            if not self._is_closed and not self._idle:
                self._starter.submit(self._add_spare)
            self._all.remove(process)
        process.close()

    def _add_spare(self) -> None:
        try:
            process = self._started()
        except (OSError, RuntimeError):
            logger.exception("a process that renders conversations did not start; the next is tried when it is needed")
            return
        self._give_back(process)

    def _started(self) -> Renderer:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the engine is closed")
            process = Renderer(self._limit_s)
            self._all.append(process)
        try:
            process.start()
        except BaseException:
            with self._lock:
                self._all.remove(process)
            process.close()
            raise
        return process


def render_job(
    chat: Mapping[str, Any],
    templates: Mapping[str, str],
    own_template: str | None,
    special_tokens: Mapping[str, str],
    content_format: str = "auto",
) -> dict[str, Any]:
    """What a renderer needs for a conversation.

    Args:
        chat: As in ``EngineRequest``.
        templates: The model's, by name.
        own_template: The server's in place of them.
        special_tokens: The model's, by name; the template sees them.
        content_format: What the template sees of contents, as ``jaxserve.text.chat.render_chat`` takes it.

    Raises:
        RequestError: A conversation of the wrong form, no template, or an option that there is not.
    """
    values = {name: value for name, value in chat.items() if value is not None}
    variables = values.pop("chat_template_kwargs", {})
    unknown = sorted(set(values) - set(_ARGUMENTS))
    if unknown:
        raise RequestError(f"a conversation has no option {unknown[0]!r}; there is {', '.join(_ARGUMENTS)}")
    (conversation,) = split_conversations([values.get("messages")])
    tools = values.get("tools")
    given = values.get("chat_template")
    is_template = isinstance(given, str) and (given in templates or "{{" in given or "{%" in given)
    if given is not None and not is_template:  # never a file's name
        raise RequestError("chat_template is no Jinja template", parameter="chat_template", value=given)
    return {
        "conversation": conversation,
        "template": choose_template(templates, given or own_template, tools is not None),
        "tools": tools,
        "add_generation_prompt": values.get("add_generation_prompt", True),
        "continue_final_message": values.get("continue_final_message", False),
        "content_format": content_format,
        "variables": {**special_tokens, **check_variables("chat_template_kwargs", variables)},
    }
