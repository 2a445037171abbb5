"""Load a model's tokenizer, and encode and decode with it."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.api.chat_messages import check_messages
from jaxserve.api.errors import ConfigError, RequestError, RequestFailedError, own_failure
from jaxserve.api.field_checks import unicode_text
from jaxserve.api.text_bound import TextBound
from jaxserve.text.chat import choose_template, render_chat
from jaxserve.text.chat_templates import plain, plain_tools, quiet_transformers
from jaxserve.text.fast_backend import FastBackend
from jaxserve.text.flagged_tokens import add_flagged_tokens
from jaxserve.text.rank_tokenizer import TEKKEN, TIKTOKEN, read_tekken, read_tiktoken
from jaxserve.text.sentencepiece_backend import SentencePieceBackend, read_sentencepiece
from jaxserve.text.token_pieces import TokenPieces
from jaxserve.text.tokenizer_files import SPECIAL_NAMES, TokenizerSettings, read_settings

_PATH_NAME = re.compile(r".*_(file|path|dir|directory)s?")


def tokenizer_info(config: Mapping[str, Any], directory: Path, **defaults: Any) -> dict[str, Any]:
    """Return the contents of a tokenizer_config.json for clients: special tokens as strings, paths removed.

    Args:
      config: Contents of the file.
      directory: Directory of the tokenizer; values that contain its path are removed.
      **defaults: Values of fields that the file may lack.
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


MODES = ("auto", "hf", "slow")
_FAST = "tokenizer.json"
_PROBES = ("", *(character * 64 + "!\n" for character in "a1 \n-"))
"""Texts at which an expression that backtracks exponentially fails, so that it is refused at start-up."""


class Tokenizer:
    """A model's vocabulary, special tokens and chat templates; created by `load_tokenizer`."""

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
        """The transformers tokenizer of the directory, loaded on first use; None if there is only a tokenizer.model.

        transformers would load that too, but may silently produce different ids.
        """
        if self._given_hf is not None or isinstance(self._backend, SentencePieceBackend):
            return self._given_hf
        if self._directory.is_file():  # a model in one file, which has no tokenizer that transformers could read
            return _as_transformers(self._backend, self.special_tokens)
        hf = _load_with_transformers(self._directory)
        add_flagged_tokens(hf.backend_tokenizer, self._settings.config, self.special_tokens)
        return hf

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's embedding is often larger."""
        return self._backend.vocab_size

    @property
    def num_ordinary_tokens(self) -> int:
        """Number of tokens without added ones, which the vocabulary of every model of this tokenizer includes."""
        return self._backend.num_ordinary_tokens

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, or None."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, or None; generation_config.json may have more."""
        return self._named_id("eos_token")

    @property
    def text_bound(self) -> TextBound | None:
        """How much of a text one token can stand for; None if there is no limit."""
        return self._backend.text_bound

    @property
    def all_special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` removes."""
        return self._backend.special_ids

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by name, such as "bos_token"; they are variables of chat templates."""
        return dict(self._settings.special_tokens)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Sources of the chat templates by name, such as "default"."""
        return dict(self._settings.chat_templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, which may contain special tokens.

        Args:
          text: The text.
          add_special_tokens: Whether to add the model's special tokens, usually BOS.

        Raises:
          RequestError: The text is not valid Unicode (a lone surrogate).
          RequestFailedError: The tokenizer fails at the text, such as an expression that backtracks too often.
        """
        with _text_errors():
            return self._backend.encode(unicode_text("the text", text), add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts, in parallel if the library supports it."""
        with _text_errors():
            return self._backend.encode_batch([unicode_text("the text", text) for text in texts], add_special_tokens)

    def starts(self, text: str) -> list[int] | None:
        """Return where each token of a text begins in it, without special tokens; None if the library cannot tell."""
        if not isinstance(self._backend, FastBackend):
            return None
        with _text_errors():
            return self._backend.starts(unicode_text("the text", text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some ids. Ids outside the vocabulary have no text; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode([token_id for token_id in token_ids if 0 <= token_id < 2**32], skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, including special tokens, for `Logprob.decoded_token`."""
        return self.pieces(skip_special_tokens=False).shown(token_id)

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes | None:
        """Return what a token adds to a text, for `Logprob.token_bytes`; None if that is `token_text` in UTF-8."""
        pieces = self.pieces(skip_special_tokens)
        text = pieces[token_id]
        if text is None:
            return pieces.raw(token_id)
        return b"" if skip_special_tokens and not text and self.token_text(token_id) else None

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as spelled in the vocabulary ("Ġthe", "<0xC3>"); None if the id is not in it."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def pieces(self, skip_special_tokens: bool = True) -> TokenPieces:
        """Return the pieces for a `Detokenizer`; all sequences share them."""
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
        """Render a conversation to a prompt with special tokens, including BOS; see `render_chat` for the arguments."""
        checked = check_messages("messages", messages)
        template = choose_template(self._settings.chat_templates, chat_template, tools is not None)
        try:
            conversation, schemas, more = plain(checked), plain_tools(tools), plain(variables)
        except Exception as error:  # objects and functions of the caller can raise anything
            raise RequestError(f"the chat template failed: {error}") from error
        return render_chat(
            conversation,
            template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=schemas,
            variables={**self.special_tokens, **more},
        )

    def apply_chat_template(self, messages: Any, *arguments: Any, **options: Any) -> list[int]:
        """Return the ids of a conversation. The template writes the special tokens, so none are added.

        Args:
          messages: The conversation.
          arguments: Further arguments of ``render_chat``.
          options: The same, by name.

        Raises:
          RequestError: There is no template, it fails, or a message is invalid.
        """
        return self.encode(self.render_chat(messages, *arguments, **options), add_special_tokens=False)

    def info(self, chat_template: str | None = None) -> dict[str, Any]:
        """Return tokenizer_config.json with its class, special tokens and chat template, without paths.

        Args:
          chat_template: Source of the template in use; None for the model's default.
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
    """Load the tokenizer of a model directory, without running code from it and without downloads.

    Args:
      directory: Directory with tokenizer.json, Mistral's tekken.json, Kimi's tiktoken.model, a sentencepiece
        tokenizer.model, or files that transformers can load (vocab.json and merges.txt).
      tokenizer_mode: "auto" tries them in that order; "hf" always uses transformers, which takes about 1 s longer;
        "slow" uses tokenizer.model if there is one, else transformers.

    Raises:
      ConfigError: The tokenizer is missing, invalid or unsupported.
    """
    if tokenizer_mode not in MODES:
        raise ConfigError(f"tokenizer_mode must be one of {MODES}, got {tokenizer_mode!r}")
    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(f"no tokenizer: {path} is not a directory")
    settings = read_settings(path)
    if tokenizer_mode == "auto" and (path / _FAST).is_file():
        fast = _read_fast(path / _FAST)
        if _has_all(fast, settings):
            return with_flagged_tokens(path, fast, settings)
    elif tokenizer_mode == "auto" and (path / TEKKEN).is_file():
        with _file_errors(path):
            fast, settings = read_tekken(path / TEKKEN, settings)
        return with_flagged_tokens(path, fast, settings)
    elif tokenizer_mode == "auto" and (path / TIKTOKEN).is_file():
        with _file_errors(path):
            fast = read_tiktoken(path / TIKTOKEN, settings)
        return with_flagged_tokens(path, fast, settings)
    elif tokenizer_mode != "hf" and (path / "tokenizer.model").is_file():
        model = path / "tokenizer.model"
        return Tokenizer(path, SentencePieceBackend(read_sentencepiece(model), settings, str(model)), settings)
    elif not any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json")):
        message = (
            f"{path} has no tokenizer: tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, or vocab.json "
            "with merges.txt"
        )
        raise ConfigError(message)
    hf = _load_with_transformers(path)
    # A tokenizer class may define special tokens that no file has, as GPT-2's does.
    special = {name: str(token) for name, token in hf.special_tokens_map.items() if name in SPECIAL_NAMES}
    settings = dataclasses.replace(settings, special_tokens={**special, **settings.special_tokens})
    return with_flagged_tokens(path, hf.backend_tokenizer, settings, hf)


def with_flagged_tokens(
    path: Path, fast: tokenizers.Tokenizer, settings: TokenizerSettings, hf: Any = None
) -> Tokenizer:
    """Return a tokenizer of the library's, which adds the BOS and EOS that its settings ask for.

    Args:
      path: Its directory or file.
      fast: The tokenizer; changed.
      settings: Its settings.
      hf: That of transformers, if it was loaded with it.
    """
    with _file_errors(path):
        for text in _PROBES:
            fast.encode(text)
        add_flagged_tokens(fast, settings.config, settings.special_tokens)
        backend = FastBackend(fast)
    return Tokenizer(path, backend, settings, hf)


@contextlib.contextmanager
def _text_errors() -> Iterator[None]:
    """Raise any error or panic of a tokenizer's library at a text as one of the request."""
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        failure = own_failure(error)
        raise RequestFailedError(f"the tokenizer failed at this text: {failure.__cause__ or failure}") from error


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Raise any error or panic of a tokenizer's library as one of its file."""
    try:
        yield
    except BaseException as error:
        failure = own_failure(error)
        if isinstance(error, ConfigError) and str(path) in str(error):
            raise
        file = next((path / name for name in (_FAST, TEKKEN, TIKTOKEN) if (path / name).is_file()), path)
        raise ConfigError(f"{file} cannot be used as a tokenizer: {failure.__cause__ or failure}") from error


def _read_fast(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception, and panics
        failure = own_failure(error)
        raise ConfigError(f"{path} cannot be read as a tokenizer: {failure.__cause__ or failure}") from error


def _has_all(fast: tokenizers.Tokenizer, settings: TokenizerSettings) -> bool:
    """Whether tokenizer.json has every token that the other files name; if not, transformers adds them."""
    added = [token.content for token in settings.added_tokens.values()]
    named = [*settings.special_tokens.values(), *settings.more_special_tokens, *added]
    return all(fast.token_to_id(token) is not None for token in named)


def _load_with_transformers(directory: Path) -> Any:
    quiet_transformers()
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except BaseException as error:  # it does not check what the files hold
        failure = own_failure(error)
        raise ConfigError(f"transformers cannot load a tokenizer from {directory}: {failure}") from error
    if not getattr(hf, "is_fast", False):
        raise ConfigError(f"{directory}: {type(hf).__name__} has no fast implementation; add a tokenizer.json")
    return hf


def _as_transformers(backend: FastBackend, special_tokens: Mapping[str, str]) -> Any:
    quiet_transformers()
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend.copy(), **special_tokens)
