"""Defaults from the model's files: tokenizer, sampling parameters, end-of-sequence tokens, reasoning markers."""

import logging
from pathlib import Path
from typing import Any

from checkpoints import is_gguf, resolve_model
from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.device.build import EnginePlan
from jaxserve.models.hf_config import ConfigFields
from jaxserve.models.registry import family_parsers
from jaxserve.parsers import ParserNames, parser_names, reasoning_parser
from jaxserve.structured_output.reasoning import ReasoningMarkers
from jaxserve.text.chat_prompt import read_template
from jaxserve.text.gguf_tokenizer import has_tokenizer, load_model_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizer_files import read_json

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "tokenizer_config.json",
)


def chosen_parsers(config: EngineConfig, architecture: str, tokenizer: Tokenizer | None) -> ParserNames:
    """Return the parsers of reasoning and tool calls, with ``auto`` replaced by the format of the model's family.

    Args:
        config: The settings.
        architecture: Class of the language model.
        tokenizer: The tokenizer, whose chat templates tell the formats of a family apart; None if there is none.

    Raises:
        ConfigError: A parser is unknown, the two do not match, or ``auto`` has none for the family.
    """
    given = ParserNames(config.reasoning_parser, config.tool_call_parser)
    template = read_template(config.chat_template)
    if template is None:
        template = "" if tokenizer is None else "\n".join(tokenizer.chat_templates.values())
    return parser_names(given, family_parsers(architecture), architecture, template)


def reasoning_markers(name: str | None, tokenizer: Tokenizer | None) -> ReasoningMarkers | None:
    """Return the tokens that delimit the model's reasoning; None without a reasoning parser or a tokenizer."""
    if name is None or tokenizer is None:
        return None
    parser = reasoning_parser(name)
    texts = (parser.start_text, parser.end_text, *parser.content_start())
    start, end, *content = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return ReasoningMarkers(name, start, end, tuple(content)) if start and end and all(content) else None


def writable_markers(markers: ReasoningMarkers | None, vocab_size: int) -> ReasoningMarkers | None:
    """Return the markers, or None if the model lacks one of their tokens: a tokenizer may have more than the model."""
    if markers is None:
        return None
    ids = {*markers.start_ids, *markers.end_ids, *(token for content in markers.content_ids for token in content)}
    outside = sorted(token for token in ids if not 0 <= token < vocab_size)
    if not outside:
        return markers
    logger.warning(
        "reasoning_parser=%s: the tokenizer spells its markers with the tokens %s, but the model has tokens 0 to %d "
        "only; structured outputs apply from the first token, and thinking_token_budget is rejected",
        *(markers.name, outside, vocab_size - 1),
    )
    return None


def find_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    """Load the configured tokenizer or else the model's; return None if the model's directory has none."""
    if config.tokenizer is not None:
        if is_gguf(directory):
            logger.info("%s: the tokenizer is that of %s, not that of the file", directory, config.tokenizer)
        return load_model_tokenizer(
            resolve_model(
                config.tokenizer, config.tokenizer_revision, config.download_dir, config.hf_token, load_format="dummy"
            ),
            config.tokenizer_mode,
        )
    if is_gguf(directory):
        has_one = has_tokenizer(directory)
    else:
        has_one = any((directory / name).exists() for name in _TOKENIZER_FILES)
    return load_model_tokenizer(directory, config.tokenizer_mode) if has_one else None


def check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Check that a model has every token of a tokenizer but added ones, of which it may lack some.

    Raises:
        ConfigError: It has fewer, so that they belong to different models.
    """
    if tokenizer is not None and tokenizer.num_ordinary_tokens > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.num_ordinary_tokens} tokens, but the model has only {vocab_size} "
            "(vocab_size in config.json): they belong to different models; pass the model's own with --tokenizer"
        )


def eos_token_ids(config: EngineConfig, plan: EnginePlan, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the end-of-sequence tokens: those of generation_config.json, else of config.json, and the tokenizer's.

    The default of the model's class in transformers counts only if no file names a token.

    Raises:
        ConfigError: The ``eos_token_id`` of generation_config.json is not a token id or a list of them.
    """
    model = plan.config
    found = list(_declared_eos(config, plan.directory))
    if not found and not model.has_default_eos:
        found = list(model.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    if not found:
        found = list(model.eos_token_ids)
    unknown = [token for token in found if token >= model.vocab_size]
    if unknown:
        logger.warning("end-of-sequence tokens %s are outside the vocabulary of %d tokens", unknown, model.vocab_size)
    return tuple(dict.fromkeys(token for token in found if token not in unknown))


def _declared_eos(config: EngineConfig, directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the configured generation_config.json; empty if it has none."""
    directory = _defaults_directory(config, directory)
    fields = ConfigFields(read_generation_config(directory), str(directory / "generation_config.json"))
    found = fields.token_ids("eos_token_id", ())
    fields.raise_problems()
    return found


def default_sampling_params(config: EngineConfig, directory: Path) -> SamplingParams:
    """Return the sampling parameters of the configured generation_config.json, with overrides applied.

    Raises:
        ConfigError: The configured file does not exist, or has invalid sampling parameters.
    """
    try:
        return SamplingParams.from_generation_config(generation_defaults(config, directory))
    except RequestError as error:  # the other values have been checked
        raise ConfigError(f"{_defaults_directory(config, directory) / 'generation_config.json'}: {error}") from error


def generation_defaults(config: EngineConfig, directory: Path) -> dict[str, Any]:
    """Return the fields of the configured generation_config.json, with overrides applied.

    Raises:
        ConfigError: The configured file does not exist.
    """
    override = config.override_generation_config or {}
    found = {}
    if config.generation_config != "vllm":
        found = read_generation_config(_defaults_directory(config, directory))
    if "temperature" in override:
        found.pop("do_sample", None)  # false would set the temperature to 0
    return {**found, **override}


def _defaults_directory(config: EngineConfig, directory: Path) -> Path:
    if config.generation_config in ("auto", "vllm"):
        return directory.parent if is_gguf(directory) else directory
    chosen = Path(config.generation_config)
    if not (chosen / "generation_config.json").exists():
        raise ConfigError(
            "generation_config: expected 'auto', 'vllm' or a directory with a generation_config.json, got "
            f"{config.generation_config!r}"
        )
    return chosen


def read_generation_config(directory: Path) -> dict:
    """Read generation_config.json; return an empty dict if the directory has none."""
    path = directory / "generation_config.json"
    found = read_json(path)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found or {}
