"""Finds a model's directory or GGUF file: a local one, or in the snapshot of a repository on the Hugging Face hub."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpoints.choice import has_model
from checkpoints.errors import CheckpointError
from checkpoints.gguf_choice import choose_tagged, describe, gguf_in, is_gguf, tag_patterns
from checkpoints.quantized.gguf_file import part_names

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
SAFETENSORS_PATTERNS = ("*.safetensors",)
TORCH_PATTERNS = ("pytorch_model*.bin",)
# Subfolders hold other formats (onnx/, original/); consolidated files repeat the weights in Mistral's own names.
IGNORE_PATTERNS = ("*/*", "consolidated*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TAGGED_ID = re.compile(rf"({_HUB_ID.pattern}):([A-Za-z0-9][\w.-]*)")

_WEIGHT_PATTERNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "auto": (SAFETENSORS_PATTERNS, TORCH_PATTERNS),
    "safetensors": (SAFETENSORS_PATTERNS,),
    "pt": (TORCH_PATTERNS,),
    "dummy": ((),),
}


def resolve_model(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
) -> Path:
    """Return a local directory with the model's files, or its GGUF file, downloading them first when needed.

    A download has the configuration, the tokenizer and the safetensors weights; `pytorch_model*.bin` only when the
    repository has no safetensors with a model's tensors. Python files are never downloaded. Of a GGUF file in parts,
    the path is that of the first.

    Args:
        model: a directory, a GGUF file, a hub id such as `Qwen/Qwen3-0.6B`, or one with the tag of a GGUF file, such as
            `Qwen/Qwen3-0.6B-GGUF:Q8_0`; an existing path takes precedence. A directory with one GGUF file and no other
            weights is that file.
        revision: branch, tag or commit of a hub id.
        download_dir: where downloads are kept; None for huggingface_hub's cache.
        token: access token of the hub; None for the one set by `hf auth login` or `HF_TOKEN`.
        load_format: `safetensors` or `pt` downloads only weights of that format, `dummy` none.

    Raises:
        CheckpointError: neither a directory nor a hub id, a revision for a directory, not found, gated, offline and not
            yet downloaded, or a repository without weights.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise CheckpointError(
                f"{model} is a {'directory' if path.is_dir() else 'file'}, so revision={revision!r} does not apply; "
                "pass a hub id or no revision"
            )
        return _local(path, load_format)
    tagged = _TAGGED_ID.fullmatch(model)
    if tagged is not None:
        return _download_gguf(tagged[1], tagged[3], revision, download_dir, token, load_format)
    if _HUB_ID.fullmatch(model) is None:
        raise CheckpointError(
            f"{model!r} is neither an existing directory nor a GGUF file nor a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    first, *others = _WEIGHT_PATTERNS[load_format]
    snapshot = _download(model, revision, download_dir, token, [*CONFIG_PATTERNS, *first])
    if load_format == "dummy" or (first == SAFETENSORS_PATTERNS and has_model(snapshot)):
        return snapshot
    for wanted in others:
        snapshot = _download(model, revision, download_dir, token, [*CONFIG_PATTERNS, *wanted])
    names = [pattern for wanted in (first, *others) for pattern in wanted]
    if any(True for pattern in names for _ in snapshot.glob(pattern)):
        return snapshot
    ggufs = _ggufs(model, revision, token)
    if ggufs and load_format == "auto":
        raise CheckpointError(
            f"hub repository {model!r} has GGUF files: pass the tag of one, as in {model}:Q4_K_M; it has {ggufs}"
        )
    raise CheckpointError(
        f"hub repository {model!r} has {'neither' if len(names) > 1 else 'no'} {' nor '.join(names)} weights; "
        f"it has {', '.join(sorted(file.name for file in snapshot.iterdir())) or 'no model files'}"
    )


def _local(path: Path, load_format: str) -> Path:
    """Return a local model: a directory, or a GGUF file."""
    if path.is_dir():
        is_configured = load_format == "dummy" and next(path.glob("*.json"), None) is not None
        found = None if is_configured or load_format not in ("auto", "dummy") else gguf_in(path)
        return path if found is None else found
    if not is_gguf(path):
        raise CheckpointError(
            f"{path} is a file; expected a model directory, a .gguf file or a hub id such as 'Qwen/Qwen3-0.6B'"
        )
    _check_format(str(path), load_format)
    part_names(path)
    return path


def _check_format(model: str, load_format: str) -> None:
    if load_format not in ("auto", "dummy"):
        raise CheckpointError(f"load_format={load_format!r} reads no GGUF files such as {model}; use 'auto'")


def _download_gguf(
    model: str, tag: str, revision: str | None, download_dir: str | None, token: str | None, load_format: str
) -> Path:
    """Return the GGUF file of a repository that has a tag, downloading it and the configuration beside it."""
    _check_format(f"{model}:{tag}", load_format)
    snapshot = _download(model, revision, download_dir, token, [*CONFIG_PATTERNS, *tag_patterns(tag)], ("*mmproj*",))
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
    chosen = choose_tagged(tag, names)
    if chosen is None:
        found = _ggufs(model, revision, token) or "none"
        raise CheckpointError(f"hub repository {model!r} has no GGUF file with the tag {tag}; it has {found}")
    part_names(snapshot / chosen)
    return snapshot / chosen


def _ggufs(model: str, revision: str | None, token: str | None) -> str:
    """Return the names of a repository's GGUF files, for messages; empty if there are none or it cannot be listed."""
    from huggingface_hub import HfApi

    with suppress(CheckpointError), _errors(model, revision):
        return describe(HfApi(os.environ.get("HF_ENDPOINT")).list_repo_files(model, revision=revision, token=token))
    return ""


def _download(
    model: str,
    revision: str | None,
    download_dir: str | None,
    token: str | None,
    patterns: list[str],
    ignored: tuple[str, ...] = IGNORE_PATTERNS,
) -> Path:
    from huggingface_hub import snapshot_download  # takes a quarter of a second: not for local models

    with _errors(model, revision):
        snapshot = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=list(ignored),
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    return Path(snapshot)


@contextmanager
def _errors(model: str, revision: str | None) -> Iterator[None]:
    """Raise the hub's errors as errors of the checkpoint that say what to do."""
    from huggingface_hub import errors

    at = f"{model!r}" if revision is None else f"{model!r} at revision {revision!r}"
    try:
        yield
    except errors.HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither an existing directory nor a valid hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"hub repository {model!r} is gated: accept its terms on its page, then pass a token or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"hub repository {model!r} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model!r} is neither an existing directory nor a hub repository that is public or open to your token"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{at} has not been downloaded yet and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set); "
            "pass a local directory or download it first while online"
        ) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"the hub refused {at}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{at} could not be downloaded: {error}") from error
