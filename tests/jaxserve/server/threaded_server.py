"""Applications behind a real socket of uvicorn, in a thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def threaded_server(app: Any, **settings: Any) -> Iterator[str]:
    """The base URL of an application that runs while the block does; ``settings`` are uvicorn's."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # so that who connects before the server runs waits for it
        # As in the product, uvicorn does not set up its loggers: other tests of this process look at them.
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
