"""The requests that ``scripts/count_call_path.py`` traces: each runs twice before it counts.

python scenarios.py NAME SWITCH
"""

import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OFF, ON, WRITE = b"\0", b"\1", b"\2"
_LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
_SETTLE_S = 0.5  # until no process does anything more for the request


def generate(switch: Callable[[bytes], None], **options: Any) -> None:
    """Answer one prompt of 4 tokens through ``LLM.generate``."""
    import jaxserve

    params = jaxserve.SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **options})
    with jaxserve.LLM("demo", **_LIMITS) as llm:
        for value in (OFF, OFF, ON):
            switch(value)
            llm.generate(["1+1="], params, use_tqdm=False)
        switch(WRITE)


def stop(switch: Callable[[bytes], None]) -> None:
    """Answer it twice over, with a stop string."""
    generate(switch, n=2, stop=["##"], temperature=0.8, seed=7)


def chat(switch: Callable[[bytes], None]) -> None:
    """Stream one chat completion over HTTP."""
    from scripts.server_child import as_flags, running_server

    body = {"model": "demo", "messages": [{"role": "user", "content": "1+1="}], "stream": True}
    body |= {"temperature": 0, "max_tokens": 4}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        with running_server("demo", as_flags(_LIMITS), Path(log.name)) as server:
            for value in (OFF, OFF, ON):
                time.sleep(_SETTLE_S)
                switch(value)
                connection = http.client.HTTPConnection(server.http.removeprefix("http://"))
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                answer = connection.getresponse().read()
                connection.close()
                if b"[DONE]" not in answer:
                    raise RuntimeError(f"expected a whole stream, got {answer!r}")
            time.sleep(_SETTLE_S)
            switch(WRITE)


SCENARIOS = {"generate": generate, "stop": stop, "chat": chat}


def main() -> None:
    """Run a scenario."""
    name, path = sys.argv[1:]

    def switch(value: bytes) -> None:
        with open(path, "r+b") as file:
            file.write(value)
        if value == WRITE:
            time.sleep(1.0)  # all processes write what they noted

    SCENARIOS[name](switch)


if __name__ == "__main__":
    main()
