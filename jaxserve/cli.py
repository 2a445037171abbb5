"""The ``jaxserve`` command."""

import argparse
import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.api.errors import ConfigError, JaxserveError
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.text_files import decode_text, json_line, read_bytes, read_text, split_lines
from jaxserve.cli_arguments import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_arguments,
    sampling_arguments,
)
from jaxserve.group import launch
from jaxserve.group.settings import GroupPlace
from jaxserve.log_output import LogFormat, queued_log
from jaxserve.server import command
from jaxserve.standard_streams import STATUS_FAILED, standard_streams

if TYPE_CHECKING:
    from jaxserve.llm import LLM


_LABORATORY = {
    "plan": ("plan.command", "plan a model on a mesh: memory, communication and time, without weights or devices"),
    "compare": ("compare.compare", "compare the meshes and layouts of a number of devices, and recommend one"),
    "models": ("models", "list the architectures that run and the formats of weights that are read"),
    "show": ("show.show", "draw where each weight and each KV page of a model is on a mesh, and a layer's collectives"),
}
"""Module and help of each command."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; on an error exit with status 2 and one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with standard_streams(needs_output=given[:1] not in (["serve"], ["launch"])):
            _run(given)
    except (JaxserveError, ValueError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        sys.exit(STATUS_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(given: list[str]) -> None:
    if given[:1] == ["serve"]:
        given[1:] = command.with_config_file(given[1:])
    options = _parser(given[:1]).parse_args(given)
    level = logging.WARNING if options.quiet else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("jaxserve").setLevel(level)
    options.given = given
    options.run(options)


def _parser(wanted: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser of all commands; modules that need JAX are imported only for commands that need them."""
    parser = FlagParser(prog="jaxserve", description="LLM inference in JAX.", allow_abbrev=False)
    version = importlib.metadata.version("jaxserve")
    parser.add_argument("-v", "--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    serve = commands.add_parser("serve", help=command.HELP, description=command.HELP, allow_abbrev=False)
    command.add_arguments(serve)
    _add_common(serve, _serve)
    several = commands.add_parser("launch", help=launch.HELP, description=launch.HELP, allow_abbrev=False)
    launch.add_arguments(several)
    _add_common(several, launch.run)
    several.set_defaults(with_config=command.with_config_file)
    bench = commands.add_parser("bench", help="measure speed")
    if list(wanted) == ["bench"]:
        _add_benches(bench.add_subparsers(required=True, metavar="BENCH"))
    for name, (_, help_) in _LABORATORY.items():
        tool = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        if list(wanted) == [name]:
            _add_laboratory(tool, name)
    _add_convert(commands)
    _add_eval(commands)
    return parser


def _add_benches(benches: Any) -> None:
    from jaxserve.bench import latency, speculation, startup, throughput
    from jaxserve.bench.serve import serve

    for module in (latency, throughput, startup, speculation, serve):
        bench = benches.add_parser(module.NAME, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(bench)
        if module is serve:  # it benchmarks a running server, so it needs no engine flags
            bench.set_defaults(run=module.run, quiet=False)
            continue
        add_engine_arguments(bench)
        _add_common(bench, module.run)


def _add_laboratory(parser: argparse.ArgumentParser, name: str) -> None:
    module = importlib.import_module(f"jaxserve.lab.{_LABORATORY[name][0]}")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, quiet=True)


def _add_common(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="do not log the start-up")
    parser.set_defaults(run=run)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="generate text", description="Generate completions of prompts.", allow_abbrev=False
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="prompt; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="file with one prompt per line; - for standard input")
    parser.add_argument("--prompt-token-ids", metavar="FILE", help="JSON file with a list of lists of token ids")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a user message of a chat")
    parser.add_argument("--json", action="store_true", help="print one JSON line per prompt")
    add_engine_arguments(parser)
    add_sampling_arguments(parser)
    _add_common(parser, _generate)


def _add_convert(commands: Any) -> None:
    help_ = "convert a checkpoint to another format"
    parser = commands.add_parser("convert", help=help_, description=help_, allow_abbrev=False)
    parser.add_argument("source", help="model directory, .gguf file, hub id, or demo")
    parser.add_argument("destination", help="directory to write; must be empty or not exist")
    parser.add_argument("--format", required=True, choices=("orbax", "safetensors"), help="format to write")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="dtype of the written weights (default: as stored)"
    )
    parser.add_argument(
        "--quantization",
        metavar="METHOD",
        help="quantize the layers' matrices of a float checkpoint and write them as compressed-tensors: int8_w8a8, "
        "int8_per_channel_weight_only, int4_group, fp8_per_tensor, fp8_per_channel or fp8_per_block",
    )
    _add_common(parser, _convert)


def _add_eval(commands: Any) -> None:
    help_ = "measure the demo model's accuracy on held-out questions"
    parser = commands.add_parser("eval", help=help_, description=help_, allow_abbrev=False)
    parser.add_argument("suite", choices=("demo",), help="what to evaluate")
    parser.add_argument("--items", type=int, default=500, help="questions per task (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    add_engine_arguments(parser)
    _add_common(parser, _evaluate)


@contextlib.contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Let gRPC's C library, which is imported in the block, write nothing unless ``GRPC_VERBOSITY`` says so.

    It would write a line to standard error for each handshake that fails, in its own form, and wait while a pipe there
    is full. The C library in JAX must not see the variable: nothing would be written of errors that end the process.
    """
    if "GRPC_VERBOSITY" in os.environ:
        yield
        return
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        yield
    finally:
        del os.environ["GRPC_VERBOSITY"]


def _serve(options: argparse.Namespace) -> None:
    with _quiet_grpc():
        from jaxserve.server.main import serve

    arguments, config, group = command.serve_arguments(options)
    if group.is_on_ray:
        from jaxserve.group.ray_cluster import RayLauncher

        sys.exit(RayLauncher(options.given, group, arguments, config.restart_engine, config.insecure).run())
    if group.parent_fd is not None:
        launch.end_with(group.parent_fd)
    replicas = group.replicas(options.given, arguments)
    place = None if group.is_alone else group.place(end=lambda: os.kill(os.getpid(), signal.SIGTERM))
    if place is not None and group.headless and config.restart_engine and group.group_secret_fd is None:
        sys.exit(launch.follow(options.given))
    if place is not None and group.headless and replicas is not None:
        from jaxserve.server.node import run_node

        follow = functools.partial(_follow, log_format=config.log_format)
        sys.exit(run_node(arguments, place, replicas, config.log_format, follow))
    if place is not None and group.headless:
        _follow(arguments, place, config.log_format)
    with queued_log(config.log_format):
        status = asyncio.run(serve(arguments, config, place, replicas))
    sys.exit(status)


def _follow(arguments: Mapping[str, Any], place: GroupPlace, log_format: LogFormat) -> NoReturn:
    from jaxserve.group.follower import run_follower

    with queued_log(log_format, place.log_name, has_prefix=True):
        run_follower(arguments, place)


def _generate(options: argparse.Namespace) -> None:
    from jaxserve.llm import LLM

    prompts = _prompts(options)
    params = sampling_arguments(options)
    with LLM(**engine_arguments(options)) as llm:
        if len(prompts) == 1 and not options.json and not options.chat and (params is None or params.n == 1):
            _stream(llm, prompts[0], params)
            return
        start = time.monotonic()
        if options.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, params, use_tqdm=not options.quiet)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=not options.quiet)
        elapsed = time.monotonic() - start
    for output in outputs:
        print(_as_json(output) if options.json else _as_text(output))
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    if not options.json:
        print(f"{len(outputs)} prompts, {tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens/s")


def _prompts(options: argparse.Namespace) -> list[Any]:
    prompts: list[Any] = list(options.prompt)
    if options.prompts is not None:
        if options.prompts == "-":
            text = decode_text(sys.stdin.buffer.read(), "--prompts -")
        else:
            text = read_text("--prompts", options.prompts)
        prompts += [line for line in split_lines(text) if line.strip(" \t")]
    if options.prompt_token_ids is not None:
        prompts += _token_ids(options.prompt_token_ids)
    if not prompts:
        raise ValueError("no prompts; pass --prompt TEXT, --prompts FILE or --prompt-token-ids FILE")
    return prompts


def _token_ids(path: str) -> list[list[int]]:
    """Read the prompts of a JSON file.

    Raises:
        ConfigError: It cannot be read, or is no list of lists of token ids.
    """
    flag = "--prompt-token-ids"
    try:
        found: Any = json.loads(read_bytes(flag, path))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{flag}: {path} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(_is_ids(one) for one in found):
        raise ConfigError(f"{flag}: expected a list of lists of token ids in {path}, such as [[1, 2], [3]]")
    return found


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _stream(llm: "LLM", prompt: Any, params: SamplingParams | None) -> None:
    """Print a completion while it is generated."""
    start, shown, output = time.monotonic(), 0, None
    print(prompt if isinstance(prompt, str) else "", end="", flush=True)
    for output in llm.stream(prompt, params):
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    elapsed = time.monotonic() - start
    tokens = 0 if output is None else len(output.outputs[0].token_ids)
    print(f"\n{tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.1f} tokens/s")


def _as_text(output: RequestOutput) -> str:
    return "\n".join(f"{output.prompt or output.prompt_token_ids}{completion.text}" for completion in output.outputs)


def _as_json(output: RequestOutput) -> str:
    fields = ("index", "text", "token_ids", "cumulative_logprob", "finish_reason", "stop_reason")
    completions = [{name: getattr(completion, name) for name in fields} for completion in output.outputs]
    return json_line(
        {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": completions},
        sys.stdout.encoding,
    )


def _convert(options: argparse.Namespace) -> None:
    from checkpoints import convert, is_gguf
    from jaxserve.models.loading import (
        find_model_directory,
        has_openai_config,
        known_listings,
        read_model_config,
        read_model_fields,
    )
    from jaxserve.models.output_head import choose_head
    from jaxserve.models.stored_forms import quantizable
    from jaxserve.text.gguf_tokenizer import gguf_tokenizer_files

    source = find_model_directory(options.source)
    files = None
    if is_gguf(source) or has_openai_config(source):
        config = json.dumps(read_model_fields(source)[0], indent=2).encode()
        files = {"config.json": config, **(gguf_tokenizer_files(source) if is_gguf(source) else {})}
    quantization = None
    if options.quantization is not None:
        quantization = options.quantization, quantizable(choose_head(read_model_config(source), source), source)
    convert(source, options.destination, options.format, options.dtype, known_listings(source), files, quantization)


def _evaluate(options: argparse.Namespace) -> None:
    from jaxserve.bench.accuracy import evaluate_demo

    evaluate_demo(engine_arguments(options), options.items, options.json)
