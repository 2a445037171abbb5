"""Text to token ids and back, as the model's own files say, and what a server tells clients of a tokenizer."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.chat_messages import check_messages
from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.chat import choose_template, quiet_transformers, render_chat
from jaxserve.text.fast_backend import FastBackend
from jaxserve.text.sentencepiece_backend import SentencePieceBackend
from jaxserve.text.token_pieces import TokenPieces
from jaxserve.text.tokenizer_files import SPECIAL_NAMES, TokenizerSettings, read_settings

_PATH_NAME = re.compile(r".*_(file|path|dir|directory)s?")


def tokenizer_info(config: Mapping[str, Any], directory: Path, **defaults: Any) -> dict[str, Any]:
    """The contents of a tokenizer_config.json, special tokens as plain text.

    Args:
      config: The contents.
      directory: The tokenizer's. What names it is left out, as are names of files.
      **defaults: Values that the file may lack.
    """
    return {**defaults, **_plain(config, str(directory.resolve()))}


def _plain(value: Any, directory: str) -> Any:
    if isinstance(value, list):
        return [_plain(item, directory) for item in value if not _is_path(item, directory)]
    if not isinstance(value, Mapping):
        return value
    if isinstance(value.get("content"), str):  # a token
        return value["content"]
    return {
        name: _plain(item, directory)
        for name, item in value.items()
        if not _PATH_NAME.fullmatch(name) and not _is_path(item, directory)
    }


def _is_path(value: Any, directory: str) -> bool:
    return isinstance(value, str) and directory in value


MODES = ("auto", "hf")


class Tokenizer:
    """A model's vocabulary, special tokens and chat templates. Make one with `load_tokenizer`."""

    def __init__(
        self, directory: Path, backend: FastBackend | SentencePieceBackend, settings: TokenizerSettings, hf: Any = None
    ) -> None:
        self._directory = directory
        self._backend = backend
        self._settings = settings
        self._given_hf = hf
        self._pieces: dict[bool, TokenPieces] = {}

    @cached_property
    def hf(self) -> Any:
        """The transformers tokenizer of the same directory, loaded on first use; None for sentencepiece-only ones.

        transformers would load those too, but with other ids and without a warning.
        """
        if self._given_hf is not None or isinstance(self._backend, SentencePieceBackend):
            return self._given_hf
        return _load_with_transformers(self._directory)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding is often larger."""
        return self._backend.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, None when the files name none."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text; generation_config.json may name more."""
        return self._named_id("eos_token")

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._backend.special_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by name, such as "bos_token"; chat templates see them."""
        return dict(self._settings.special_tokens)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Sources of the chat templates by name; the usual one is "default"."""
        return dict(self._settings.chat_templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text; special tokens written out in it are recognised.

        Args:
          text: The text.
          add_special_tokens: Add the model's special tokens before (and after) the text, usually BOS.

        Raises:
          RequestError: The text is not valid Unicode (a lone surrogate).
        """
        return self._backend.encode(_valid(text), add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Returns the ids of several texts, on several threads where the library can."""
        return self._backend.encode_batch([_valid(text) for text in texts], add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of some ids. Ids outside the vocabulary add nothing; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode([token_id for token_id in token_ids if 0 <= token_id < 2**32], skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns one token's text by itself, spaces kept, special tokens shown: `Logprob.decoded_token`."""
        return self.pieces(skip_special_tokens=False).shown(token_id)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns a token as the vocabulary spells it ("Ġthe", "<0xC3>"), None when the vocabulary lacks the id."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a token, None when the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def pieces(self, skip_special_tokens: bool = True) -> TokenPieces:
        """Returns the table that `Detokenizer` works with; all sequences share it."""
        if skip_special_tokens not in self._pieces:
            self._pieces[skip_special_tokens] = self._backend.make_pieces(skip_special_tokens)
        return self._pieces[skip_special_tokens]

    def render_chat(
        self,
        messages: Any,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Returns a conversation as prompt text, special tokens (BOS too) written out. Arguments as `render_chat`."""
        return render_chat(
            check_messages("messages", messages),
            choose_template(self._settings.chat_templates, chat_template, tools is not None),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **variables},
        )

    def apply_chat_template(
        self,
        messages: Any,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Returns the ids of a conversation. The template writes BOS itself where it belongs: none is added.

        Raises:
          RequestError: No template, a message of the wrong form, or a conversation that the template refuses.
        """
        text = self.render_chat(
            messages, chat_template, add_generation_prompt, continue_final_message, tools, **variables
        )
        return self.encode(text, add_special_tokens=False)

    def info(self, chat_template: str | None = None) -> dict[str, Any]:
        """Returns what tokenizer_config.json says, with a class, special tokens and the chat template; no paths.

        Args:
          chat_template: The source of the one in use; None: the model's usual one.
        """
        default_class = (
            "LlamaTokenizer" if isinstance(self._backend, SentencePieceBackend) else "PreTrainedTokenizerFast"
        )
        template = self.chat_templates.get("default") if chat_template is None else chat_template
        defaults = {"tokenizer_class": default_class, **self.special_tokens}
        info = tokenizer_info(self._settings.config, self._directory, **defaults)
        return info if template is None else {**info, "chat_template": template}

    def _named_id(self, name: str) -> int | None:
        if isinstance(self._backend, SentencePieceBackend):
            return self._backend.bos_id if name == "bos_token" else self._backend.eos_id
        token = self._settings.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(directory: str | Path, tokenizer_mode: str = "auto") -> Tokenizer:
    """Loads the tokenizer of a model directory. No code from the directory ever runs, and nothing is downloaded.

    Args:
      directory: Holds tokenizer.json, or a sentencepiece tokenizer.model, or files that transformers understands
        (vocab.json and merges.txt).
      tokenizer_mode: "auto": in that order. "hf": always through transformers (about 1 s slower to start).

    Raises:
      ConfigError: No tokenizer, a broken one, or one of an unsupported kind.
    """
    if tokenizer_mode not in MODES:
        raise ConfigError(f"tokenizer_mode must be one of {MODES}, got {tokenizer_mode!r}")
    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(f"no tokenizer: {path} is not a directory")
    settings = read_settings(path)
    if tokenizer_mode == "auto" and (path / "tokenizer.json").is_file():
        fast = _read_fast(path / "tokenizer.json")
        if _has_all(fast, settings):
            return Tokenizer(path, FastBackend(fast), settings)
    elif tokenizer_mode == "auto" and (path / "tokenizer.model").is_file():
        return Tokenizer(path, SentencePieceBackend(path / "tokenizer.model", settings), settings)
    elif not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json")):
        message = f"{path} has no tokenizer: tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        raise ConfigError(message)
    hf = _load_with_transformers(path)
    # A class of transformers may have special tokens of its own (GPT-2's) that no file names.
    special = {name: str(token) for name, token in hf.special_tokens_map.items() if name in SPECIAL_NAMES}
    settings = dataclasses.replace(settings, special_tokens={**special, **settings.special_tokens})
    return Tokenizer(path, FastBackend(hf.backend_tokenizer), settings, hf)


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: {error}") from error
    return text


def _read_fast(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error


def _has_all(fast: tokenizers.Tokenizer, settings: TokenizerSettings) -> bool:
    """Whether tokenizer.json knows every token that the files beside it name; if not, transformers adds them."""
    added = [token.content for token in settings.added_tokens.values()]
    named = [*settings.special_tokens.values(), *settings.more_special_tokens, *added]
    return all(fast.token_to_id(token) is not None for token in named)


def _load_with_transformers(directory: Path) -> Any:
    quiet_transformers()
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError, json.JSONDecodeError) as error:
        raise ConfigError(f"transformers cannot load a tokenizer from {directory}: {error}") from error
    if not getattr(hf, "is_fast", False):
        raise ConfigError(f"{directory}: {type(hf).__name__} has no fast form; add a tokenizer.json")
    return hf
