"""A client that is killed by its parent: opens streams, reports it, reads a little of each, and waits to be killed.

    python -S crash_client.py HOST PORT STREAMS PROMPT
    python crash_client.py --grpc TARGET STREAMS MESSAGE-IN-HEX

The first form imports very little, so that it starts immediately.
"""

import json
import socket
import sys
import time
from typing import Any


def open_http(host: str, port: int, count: int, prompt: str) -> list[Any]:
    """Send requests for long streams over bare sockets."""
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    connections = []
    for _ in range(count):
        connection = socket.create_connection((host, port))
        connection.sendall(message)
        connections.append(connection)
    return connections


def open_grpc(target: str, count: int, message: bytes) -> list[Any]:
    """Start streams over one gRPC connection."""
    import grpc  # only here, because it imports slowly

    channel = grpc.insecure_channel(target)
    call: Any = channel.unary_stream("/jaxserve.v1.GenerationService/StreamGenerate")
    return [channel, *(call(message, wait_for_ready=True) for _ in range(count))]


def main() -> None:
    """Open the streams of the command line and wait to be killed."""
    if sys.argv[1] == "--grpc":
        opened = open_grpc(sys.argv[2], int(sys.argv[3]), bytes.fromhex(sys.argv[4]))
    else:
        opened = open_http(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    print("open", flush=True)
    while True:
        for connection in opened:
            if isinstance(connection, socket.socket):
                connection.recv(64)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
