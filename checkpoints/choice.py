"""Chooses among the checkpoints of a directory by what is in their files, and opens one."""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.arranged import ArrangedReader
from checkpoints.errors import CheckpointError
from checkpoints.fused_experts import arrange_experts, fused_experts
from checkpoints.gpt_oss_names import arrange_original, has_original_names
from checkpoints.orbax_io import OrbaxReader, find_orbax, find_trees
from checkpoints.quantized.format import Format
from checkpoints.quantized.gguf import open_gguf
from checkpoints.quantized.gguf_stored import StoredGguf
from checkpoints.quantized.reader import QuantizedReader
from checkpoints.quantized.registry import format_for
from checkpoints.quantized.settings import read_settings
from checkpoints.reader import CheckpointReader, ShardedReader, open_indexed, open_shards, read_index
from checkpoints.safetensors_reader import SafetensorsReader
from checkpoints.tensor_info import TensorInfo, whole_index
from checkpoints.torch_reader import TorchReader

logger = logging.getLogger(__name__)

Listing = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a model, by name."""
Listings = Callable[[], Sequence[Listing]]
"""Returns the forms in which checkpoints may have the tensors of a model."""

LOAD_FORMATS = ("auto", "safetensors", "pt")
_LOOKED_FOR: Mapping[str, str] = {
    "auto": "model.safetensors, model.safetensors.index.json, *.safetensors, an Orbax checkpoint, pytorch_model.bin "
    "and pytorch_model.bin.index.json",
    "safetensors": "model.safetensors, model.safetensors.index.json and *.safetensors",
    "pt": "pytorch_model.bin, pytorch_model.bin.index.json and pytorch_model*.bin",
}
_OPEN_FILE: Mapping[str, Callable[[Path], CheckpointReader]] = {
    ".safetensors": SafetensorsReader,
    ".bin": TorchReader,
    ".gguf": open_gguf,
}
_EMBEDDING_OR_HEAD = re.compile(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)\.weight")
_OF_ADAPTER = re.compile(r"base_model\..*|.*\.lora_.*|prompt_embeddings")


class _Candidate(NamedTuple):
    """One checkpoint of a directory.

    Attributes:
        name: Its file or folder, for messages.
        open: Opens it.
        is_official: Whether it has a name that only models have, so that damage is an error.
    """

    name: str
    open: Callable[[], CheckpointReader]
    is_official: bool = True


class _Opened(NamedTuple):
    """A candidate that can be read, and the number of the model's tensors that it lacks."""

    candidate: _Candidate
    reader: CheckpointReader
    num_missing: int


def open_checkpoint(path: str | Path, listings: Listings | None = None, load_format: str = "auto") -> CheckpointReader:
    """Open a checkpoint directory, or a single `.safetensors`, `.bin` or `.gguf` file.

    A directory may have several: `model.safetensors`, `model.safetensors.index.json`, an Orbax checkpoint (the
    directory itself or its folder `orbax`), other `*.safetensors` files without an index (Mistral's `consolidated*`
    left out), `pytorch_model.bin`, `pytorch_model.bin.index.json`, other `pytorch_model*.bin` files. The first that has
    the model's tensors is opened, so that an adapter or a value head beside a model is never mistaken for it. Weights
    that the directory's configuration says are quantized appear as the float tensors that they stand for.

    Args:
        path: the directory or file.
        listings: forms in which a checkpoint may have the model's tensors; None: a model has a token embedding or an
            output head, and no adapter's tensors.
        load_format: `safetensors` or `pt` reads only files of that format; `auto` all.

    Raises:
        CheckpointError: none of these exists, the one found is damaged or only an adapter, or its weights are quantized
            in a way that is not supported.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix not in _OPEN_FILE:
            raise CheckpointError(f"{path}: expected a directory, a .safetensors, a .bin or a .gguf file")
        return _OPEN_FILE[path.suffix](path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    found = list(_candidates(path, listings, load_format))
    settings = read_settings(path)
    if settings is not None:
        decoded = partial(_open_quantized, format_for(settings), listings)
        found = [candidate._replace(open=partial(decoded, candidate.open)) for candidate in found]
    found = [candidate._replace(open=partial(_open_named, listings, candidate.open)) for candidate in found]
    if not found:
        raise CheckpointError(f"{path}: no weights found; looked for {_LOOKED_FOR[load_format]}")
    reader = found[0].open() if len(found) == 1 else _open_first_model(path, found, listings)
    if listings is not None and is_adapter(reader.tensors):
        reader.close()
        raise CheckpointError(
            f"{path}: has an adapter's tensors only, not a model's; merge the adapter into its base model first"
        )
    return reader


def _open_named(listings: Listings | None, open_stored: Callable[[], CheckpointReader]) -> CheckpointReader:
    """Open a checkpoint in Hugging Face's names, which OpenAI's own files of GPT-OSS have not, and with a tensor for
    each expert where the model has one."""
    reader = open_stored()
    if has_original_names(reader.tensors):
        return ArrangedReader(reader, arrange_original)
    fused = fused_experts(reader.tensors)
    if fused and listings is not None and not any(name in form for form in listings() for name in fused):
        return ArrangedReader(reader, arrange_experts)
    return reader


def _open_quantized(
    format: Format, listings: Listings | None, open_stored: Callable[[], CheckpointReader]
) -> CheckpointReader:
    """Open a quantized checkpoint without the biases of zeros that some tools add to every layer."""
    reader = QuantizedReader(open_stored(), format)
    biases = [name.removesuffix("weight") + "bias" for name in reader.quantized]
    added = [name for name in biases if name in reader.tensors]
    if listings is not None and added:
        known = {name for form in listings() for name in form}
        reader.leave_out([name for name in added if name not in known and _is_zero(reader, name)])
    return format.arranged(reader) if isinstance(format, StoredGguf) else reader


def _is_zero(reader: CheckpointReader, name: str) -> bool:
    return not reader.read(name, whole_index(reader.tensors[name].shape)).astype(np.float32).any()


def has_model(directory: Path) -> bool:
    """Return whether the safetensors files of a directory have a model's tensors, as far as these can be read."""
    for candidate in _candidates(directory, None, "safetensors"):
        try:
            with candidate.open() as reader:
                if _looks_like_model(reader.tensors):
                    return True
        except CheckpointError:
            if candidate.is_official:  # opening it for loading reports what is wrong
                return True
    return False


def is_adapter(tensors: Collection[str]) -> bool:
    """Return whether tensors with these names are an adapter's (LoRA, prompt tuning), which changes a model."""
    return any(_OF_ADAPTER.fullmatch(name) for name in tensors)


def _looks_like_model(tensors: Collection[str]) -> bool:
    return any(_EMBEDDING_OR_HEAD.fullmatch(name) for name in tensors) and not is_adapter(tensors)


def _candidates(path: Path, listings: Listings | None, load_format: str) -> Iterator[_Candidate]:
    """Yield the checkpoints of a directory, those that are preferred first."""
    if load_format in ("auto", "safetensors"):
        yield from _named(path, "model.safetensors", SafetensorsReader)
    if load_format == "auto":
        yield from _orbax(path)
    if load_format in ("auto", "safetensors"):
        yield from _loose(path, "model.safetensors", "*.safetensors", SafetensorsReader, listings)
    if load_format in ("auto", "pt"):
        yield from _named(path, "pytorch_model.bin", TorchReader)
        yield from _loose(path, "pytorch_model.bin", "pytorch_model*.bin", TorchReader, listings)


def _named(path: Path, name: str, open_file: Callable[[Path], CheckpointReader]) -> Iterator[_Candidate]:
    """Yield the file of this name, and the files of its index."""
    if (path / name).exists():
        yield _Candidate(name, partial(open_file, path / name))
    index = f"{name}.index.json"
    if (path / index).exists():
        yield _Candidate(index, partial(open_indexed, path, index, open_file))


def _orbax(path: Path) -> Iterator[_Candidate]:
    root = find_orbax(path)
    if root is not None:
        for tree in find_trees(root) or [root]:
            yield _Candidate(str(tree.relative_to(path)), partial(OrbaxReader, tree), is_official=tree == root)


def _loose(
    path: Path,
    official: str,
    pattern: str,
    open_file: Callable[[Path], CheckpointReader],
    listings: Listings | None,
) -> Iterator[_Candidate]:
    """Yield the files of a pattern that neither have the official name nor are in its index."""
    named = {official}
    if (path / f"{official}.index.json").exists():
        named.update(read_index(path / f"{official}.index.json").values())
    files = sorted(
        file.name
        for file in path.glob(pattern)
        if file.name not in named and not file.name.startswith("consolidated") and file.is_file()
    )
    if files:
        yield _Candidate(", ".join(files), partial(_open_loose, path, files, open_file, listings), is_official=False)


def _open_loose(
    path: Path, files: list[str], open_file: Callable[[Path], CheckpointReader], listings: Listings | None
) -> CheckpointReader:
    """Open the file that has all of the model's tensors, or those that have some; all of them if none has any."""
    shards = open_shards(path, files, open_file)
    forms = [] if listings is None or len(files) == 1 else listings()
    parts = {
        file: shard
        for file, shard in shards.items()
        if (any(_num_found(shard.tensors, form) for form in forms) if forms else not is_adapter(shard.tensors))
    }
    whole = [file for file, shard in parts.items() if forms and not _num_missing(shard.tensors, forms)]
    kept = {file: parts[file] for file in whole} if len(whole) == 1 else parts
    for file, shard in shards.items():
        if kept and file not in kept:
            shard.close()
    return ShardedReader(path, kept or shards, None)


def _open_first_model(path: Path, found: Sequence[_Candidate], listings: Listings | None) -> CheckpointReader:
    """Open the first candidate that has all of the model's tensors, or the one that lacks the fewest."""
    forms = [] if listings is None else listings()
    opened, failures = list[_Opened](), list[CheckpointError]()
    try:
        for candidate in found:
            reader = _opened(candidate, failures)
            if reader is not None:
                opened.append(_Opened(candidate, reader, _num_missing(reader.tensors, forms)))
                if not opened[-1].num_missing:
                    break
    except BaseException:
        for other in opened:
            other.reader.close()
        raise
    if not opened:
        raise failures[0]
    best = min(opened, key=lambda each: each.num_missing)
    for other in opened:
        if other is not best:
            other.reader.close()
    if best.candidate is not found[0]:
        logger.info("%s: reading %s; %s has not the model's tensors", path, best.candidate.name, found[0].name)
    return best.reader


def _opened(candidate: _Candidate, failures: list[CheckpointError]) -> CheckpointReader | None:
    """Open a candidate; add to ``failures`` and return None if it is damaged and has no model's name."""
    try:
        return candidate.open()
    except CheckpointError as error:
        if candidate.is_official:
            raise
        failures.append(error)
        return None


def _num_missing(tensors: Mapping[str, TensorInfo], forms: Sequence[Listing]) -> int:
    """Return how many of the model's tensors are missing or have another shape; without forms, 0 for what looks like a
    model, 1 for what may be one and 2 for an adapter."""
    if forms:
        return min(len(form) - _num_found(tensors, form) for form in forms)
    return 2 if is_adapter(tensors) else int(not _looks_like_model(tensors))


def _num_found(tensors: Mapping[str, TensorInfo], form: Listing) -> int:
    return sum(name in tensors and tensors[name].shape == shape for name, shape in form.items())
