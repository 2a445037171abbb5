"""The server under test: its API, its model, and the tokens of random prompts."""

import argparse
import contextlib
import math
import os
import ssl
import urllib.parse
from typing import Any, NamedTuple

from jaxserve.api.sampling_options import SAMPLING_OPTIONS
from jaxserve.bench.serve.arguments import read_pairs
from jaxserve.bench.serve.effects import is_secure
from jaxserve.bench.serve.grpc import (
    MAX_CONNECTIONS,
    STREAMS_A_CONNECTION,
    GrpcBackend,
    grpc_model,
    grpc_tokens,
    open_channels,
)
from jaxserve.bench.serve.http import HttpClient
from jaxserve.bench.serve.openai import OpenAIBackend
from jaxserve.bench.serve.ready import ReadyCheck, ask_http
from jaxserve.bench.serve.records import Backend, BenchServeError
from jaxserve.bench.serve.tokens import PromptTokens, TokenSource, server_tokens
from jaxserve.cli_arguments import given_arguments


class Target(NamedTuple):
    """A server under test.

    Attributes:
        backend: Sends requests.
        model: Its model.
        tokens: The tokens of random prompts.
        client: For what else HTTP servers report; None over gRPC.
    """

    backend: Backend
    model: str
    tokens: PromptTokens
    client: HttpClient | None = None


def request_headers(options: argparse.Namespace) -> dict[str, str]:
    """Return the headers of each request, including the API key.

    Raises:
        BenchServeError: A header is not ``NAME=VALUE``, or is repeated.
    """
    headers = read_pairs("--header", options.header)
    api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    if api_key and "authorization" not in map(str.lower, headers):
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given sampling parameters."""
    names = (*SAMPLING_OPTIONS, "logprobs")
    sampling = given_arguments(options, names)
    return sampling | ({"ignore_eos": True} if options.ignore_eos else {})


async def grpc_target(
    options: argparse.Namespace,
    headers: dict[str, str],
    extra: dict[str, Any],
    ready: ReadyCheck,
    stack: contextlib.AsyncExitStack,
) -> Target:
    """Connect to the gRPC server of the flags once it is ready; the stack closes what was opened.

    Raises:
        BenchServeError: It was not ready in time, or the model is unknown.
    """
    target = urllib.parse.urlsplit(options.base_url).netloc
    most = min(options.num_prompts, options.max_concurrency or options.num_prompts)
    count = min(MAX_CONNECTIONS, math.ceil(most / STREAMS_A_CONNECTION))
    channels = open_channels(target, count, is_secure(options), options.ssl_ca_certs)
    for channel in channels:
        stack.push_async_callback(channel.close)
    model = await ready.wait(lambda: grpc_model(channels[0], options.model or "", headers))

    async def find_tokens() -> TokenSource:
        return grpc_tokens(channels[0], model.vocab_size, headers)

    backend = GrpcBackend(channels, model.id, _sampling(options), extra, headers)
    return Target(backend, model.id, PromptTokens(find_tokens))


async def http_target(
    options: argparse.Namespace,
    headers: dict[str, str],
    extra: dict[str, Any],
    ready: ReadyCheck,
    stack: contextlib.AsyncExitStack,
) -> Target:
    """Connect to the HTTP server of the flags once it reports its model; the stack closes what was opened.

    Raises:
        BenchServeError: It was not ready in time, or does not report its model.
    """
    try:
        context = ssl.create_default_context(cafile=options.ssl_ca_certs) if is_secure(options) else None
    except OSError as error:
        raise BenchServeError(f"--ssl-ca-certs: {options.ssl_ca_certs}: {error}") from error
    if context is not None and options.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = HttpClient(options.base_url, headers, context)
    stack.push_async_callback(client.close)
    name = options.model or await ready.wait(lambda: _first_model(client))
    sampling = _sampling(options)
    if options.backend == "openai-chat" and "logprobs" in sampling:
        sampling |= {"logprobs": True, "top_logprobs": sampling["logprobs"]}
    backend = OpenAIBackend(client, options.endpoint, name, {**sampling, **extra})
    return Target(backend, name, PromptTokens(lambda: ready.wait(lambda: server_tokens(client, name))), client)


async def _first_model(client: HttpClient) -> str:
    response = await ask_http(client, "GET", "/v1/models")
    models = response.json().get("data") if response.status == 200 else None
    if not models:
        raise BenchServeError(f"the server does not list its models (status {response.status}); pass --model")
    return models[0]["id"]
