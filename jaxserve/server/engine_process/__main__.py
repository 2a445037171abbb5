"""``python -m jaxserve.server.engine_process``: what ``EngineClient`` starts."""

import argparse
import logging
import sys

from jaxserve.server.engine_process.process import run


def main() -> None:
    """Reads the command line and runs an engine."""
    parser = argparse.ArgumentParser(description="Runs the engine of a server; started by its front end.")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front end")
    parser.add_argument("--log-level", type=int, default=logging.INFO, help="least level of this package's log")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jaxserve").setLevel(options.log_level)
    run(options.fd)


if __name__ == "__main__":
    main()
