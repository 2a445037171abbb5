"""Finds a model's directory: a local one, or the snapshot of a repository on the Hugging Face hub."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from checkpoints.choice import has_model
from checkpoints.errors import CheckpointError

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
SAFETENSORS_PATTERNS = ("*.safetensors",)
TORCH_PATTERNS = ("pytorch_model*.bin",)
# Subfolders hold other formats (onnx/, original/); consolidated files repeat the weights in Mistral's own names.
IGNORE_PATTERNS = ("*/*", "consolidated*")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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
    """Return a local directory with the model's files, downloading them first when needed.

    A download has the configuration, the tokenizer and the safetensors weights; `pytorch_model*.bin` only when the
    repository has no safetensors with a model's tensors. Python files are never downloaded.

    Args:
        model: a directory, or a hub id such as `Qwen/Qwen3-0.6B`; an existing directory takes precedence.
        revision: branch, tag or commit of a hub id.
        download_dir: where downloads are kept; None for huggingface_hub's cache.
        token: access token of the hub; None for the one set by `hf auth login` or `HF_TOKEN`.
        load_format: `safetensors` or `pt` downloads only weights of that format, `dummy` none.

    Raises:
        CheckpointError: neither a directory nor a hub id, a revision for a directory, not found, gated, offline and not
            yet downloaded, or a repository without weights.
    """
    directory = Path(model).expanduser()
    if model and directory.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{model} is a directory, so revision={revision!r} does not apply; pass a hub id or no revision"
            )
        return directory
    if model and directory.exists():
        raise CheckpointError(f"{model} is a file; expected a model directory or a hub id such as 'Qwen/Qwen3-0.6B'")
    if _HUB_ID.fullmatch(model) is None:
        raise CheckpointError(f"{model!r} is neither an existing directory nor a hub id such as 'Qwen/Qwen3-0.6B'")
    first, *others = _WEIGHT_PATTERNS[load_format]
    snapshot = _download(model, revision, download_dir, token, [*CONFIG_PATTERNS, *first])
    if load_format == "dummy" or (first == SAFETENSORS_PATTERNS and has_model(snapshot)):
        return snapshot
    for wanted in others:
        snapshot = _download(model, revision, download_dir, token, [*CONFIG_PATTERNS, *wanted])
    names = [pattern for wanted in (first, *others) for pattern in wanted]
    if any(True for pattern in names for _ in snapshot.glob(pattern)):
        return snapshot
    raise CheckpointError(
        f"hub repository {model!r} has {'neither' if len(names) > 1 else 'no'} {' nor '.join(names)} weights; "
        f"it has {', '.join(sorted(file.name for file in snapshot.iterdir())) or 'no model files'}"
    )


def _download(
    model: str, revision: str | None, download_dir: str | None, token: str | None, patterns: list[str]
) -> Path:
    at = f"{model!r}" if revision is None else f"{model!r} at revision {revision!r}"
    try:
        snapshot = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            token=token,
            allow_patterns=patterns,
            ignore_patterns=list(IGNORE_PATTERNS),
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither an existing directory nor a valid hub id: {error}") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"hub repository {model!r} is gated: accept its terms on its page, then pass a token or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"hub repository {model!r} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model!r} is neither an existing directory nor a hub repository that is public or open to your token"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{at} has not been downloaded yet and the hub cannot be reached (offline, or HF_HUB_OFFLINE is set); "
            "pass a local directory or download it first while online"
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refused {at}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{at} could not be downloaded: {error}") from error
    return Path(snapshot)
