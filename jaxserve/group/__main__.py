"""Run one process of a group; every launcher calls this.

python -m jaxserve.group --address HOST:PORT --count N --rank R [--secret-fd FD | --secret-file FILE] serve MODEL ...
"""

import argparse
import os
import sys
from collections.abc import Sequence


def serve_command(given: Sequence[str]) -> list[str]:
    """Return the arguments of ``jaxserve`` for a process of a group."""
    parser = argparse.ArgumentParser(prog="python -m jaxserve.group", description="Run one process of a group.")
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--count", required=True, type=int, help="number of processes")
    parser.add_argument("--rank", required=True, type=int, help="index of this process, from 0")
    secret = parser.add_mutually_exclusive_group(required=True)
    secret.add_argument("--secret-fd", type=int, help="descriptor of a pipe with the group's secret")
    secret.add_argument("--secret-file", help="file with the group's secret")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="serve MODEL and its flags")
    options = parser.parse_args(list(given))
    if options.command[:1] != ["serve"]:
        parser.error(f"expected the command serve, got {' '.join(options.command[:1]) or 'none'}")
    host, _, port = options.address.rpartition(":")
    if options.secret_fd is not None:
        secret = [f"--group-secret-fd={options.secret_fd}"]
    else:
        secret = [f"--group-secret-file={options.secret_file}"]
    place = [f"--nnodes={options.count}", f"--node-rank={options.rank}", f"--master-addr={host.strip('[]')}"]
    place += [f"--master-port={port}", *secret, *(["--headless"] if options.rank else [])]
    return [*options.command, *place]


def main() -> None:
    """Become the process, which keeps this one's id and descriptors."""
    command = serve_command(sys.argv[1:])
    os.execv(sys.executable, [sys.executable, "-P", "-m", "jaxserve", *command])


if __name__ == "__main__":
    main()
