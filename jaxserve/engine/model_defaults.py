"""What a model's own files say of its use: tokenizer, default sampling, tokens that end a text or its reasoning."""

from pathlib import Path
from typing import Any

from checkpoints import resolve_model
from jaxserve.config import EngineConfig
from jaxserve.device.build import EnginePlan
from jaxserve.errors import ConfigError, RequestError
from jaxserve.parsers import reasoning_parser, tool_parser
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.reasoning import ReasoningMarks
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from jaxserve.text.tokenizer_files import read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_parsers(config: EngineConfig) -> None:
    """Refuses names of parsers that there are not."""
    if config.reasoning_parser is not None:
        reasoning_parser(config.reasoning_parser)
    if config.tool_call_parser is not None:
        tool_parser(config.tool_call_parser)


def reasoning_marks(config: EngineConfig, tokenizer: Tokenizer | None) -> ReasoningMarks | None:
    """How the model marks its reasoning; None where there is no parser, or no tokenizer that has the marks."""
    if config.reasoning_parser is None or tokenizer is None:
        return None
    parser = reasoning_parser(config.reasoning_parser)
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in (parser.start_text, parser.end_text))
    if not start or not end:
        return None
    return ReasoningMarks(config.reasoning_parser, tuple(start), tuple(end))


def find_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    """The model's tokenizer, or the one asked for; None where the model's directory has none."""
    if config.tokenizer is not None:
        return load_tokenizer(
            resolve_model(config.tokenizer, config.tokenizer_revision, config.download_dir, config.hf_token)
        )
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(directory)


def eos_token_ids(plan: EnginePlan, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that end a text, by config.json, generation_config.json and the tokenizer."""
    found: list[Any] = list(plan.config.eos_token_ids)
    declared = read_generation_config(plan.directory).get("eos_token_id")
    found += declared if isinstance(declared, list) else [declared]
    if tokenizer is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


def default_sampling_params(config: EngineConfig, directory: Path) -> SamplingParams:
    """Sampling parameters of the model's generation_config.json, or of the one asked for, and what overrides them.

    Raises:
        ConfigError: The file asked for does not exist, or its values are no sampling parameters.
    """
    try:
        return SamplingParams.from_generation_config(generation_defaults(config, directory))
    except RequestError as error:  # the other values have been checked
        raise ConfigError(f"{_defaults_directory(config, directory) / 'generation_config.json'}: {error}") from error


def generation_defaults(config: EngineConfig, directory: Path) -> dict[str, Any]:
    """The generation config that default sampling parameters come from, under the names of the file.

    Raises:
        ConfigError: The file asked for does not exist.
    """
    override = config.override_generation_config or {}
    found = {}
    if config.generation_config != "vllm":
        found = read_generation_config(_defaults_directory(config, directory))
    if "temperature" in override:
        found.pop("do_sample", None)  # false says that the temperature is 0
    return {**found, **override}


def _defaults_directory(config: EngineConfig, directory: Path) -> Path:
    if config.generation_config in ("auto", "vllm"):
        return directory
    chosen = Path(config.generation_config)
    if not (chosen / "generation_config.json").exists():
        raise ConfigError(
            "generation_config: expected 'auto', 'vllm' or a directory with a generation_config.json, got "
            f"{config.generation_config!r}"
        )
    return chosen


def read_generation_config(directory: Path) -> dict:
    """The model's generation_config.json; empty where there is none."""
    path = directory / "generation_config.json"
    found = read_json(path)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found or {}
