"""The child process that renders chat templates; see ``renderers``. It answers each JSON line with a JSON line."""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from jaxserve.child_process import READY
from jaxserve.errors import RequestError
from jaxserve.text.chat import quiet_transformers, render_chat


def _limit_memory(extra_bytes: int) -> None:
    """Let this process grow by at most so many bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_cpu(seconds: int) -> None:
    """Let the kernel kill this process after some more seconds of work, in case its parent has died."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + seconds + 1, hard))


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"text": render_chat(job.pop("conversation"), job.pop("template"), **job)}
    except RequestError as error:
        is_memory = isinstance(error.__cause__, MemoryError)
        return {"error": "the chat template failed: it takes more memory than allowed" if is_memory else str(error)}
    except MemoryError:
        return {"error": "the chat template failed: it takes more memory than allowed"}


def main() -> None:
    """Render until standard input ends."""
    quiet_transformers()
    from transformers.utils import chat_template_utils

    del chat_template_utils  # loaded before the limits count
    first = sys.stdin.readline()
    if not first:  # the parent has ended
        return
    setup = json.loads(first)
    if sys.platform == "linux":
        _limit_memory(setup["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(READY, flush=True)
    for line in sys.stdin:
        _limit_cpu(setup["cpu_s"])
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the parent has ended: exit without flushing
        os._exit(0)
