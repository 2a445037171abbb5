"""GGUF headers: what is in them is read, and whatever contradicts the file is an error that names it."""

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.errors import CheckpointError
from checkpoints.quantized.gguf_file import GgufFile, GgufFiles
from checkpoints.quantized.gguf_header import Strings
from checkpoints.tensor_info import whole_index
from tests.fuzzing.targets import gguf_file
from tests.gguf_files import Blocks, gguf_bytes, header, plain, string, write_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "negative": -5,
    "yes": True,
    "scores": np.array([0.5, -1.5], np.float32),
    "tokens": ["a", "", "käse", "▁b"],
}
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORS = {"m": plain(MATRIX), "v": plain(np.ones(5, np.float16)), "q": Blocks((2, 32), 8, bytes(range(68)))}


def write(folder: Path, data: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return path


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path, gguf_bytes(METADATA, TENSORS))) as file:
        fields = file.metadata.fields
        for name, expected in METADATA.items():
            found = fields[name]
            if isinstance(found, np.ndarray | Strings):
                assert list(found) == list(expected)
            else:
                assert found == expected and type(found) is type(expected)
        tokens = file.metadata.strings("tokens")
        assert (tokens[2], tokens[3], len(tokens)) == ("käse", "▁b", 4)
        np.testing.assert_array_equal(file.read("m", whole_index((3, 4))), MATRIX)
        np.testing.assert_array_equal(file.read("m", (slice(1, 3), slice(2, 3))), MATRIX[1:3, 2:3])
        assert file.tensors["v"].dtype == np.float16
        assert file.stored["q"].shape == (2, 32) and file.tensors["q"].shape == (2, 34)
        assert file.read("q", (slice(1, 2), slice(0, 34))).tobytes() == bytes(range(34, 68))


def test_parts_of_a_split_file_are_one(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, parts=3)
    with GgufFiles(first) as files:
        assert set(files.tensors) == set(files.stored) == set(TENSORS)
        np.testing.assert_array_equal(files.read("m", whole_index((3, 4))), MATRIX)
    with pytest.raises(CheckpointError, match="part 2 of 3; pass the first part, m-00001-of-00003.gguf"):
        GgufFiles(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="missing: m-00003-of-00003.gguf"):
        GgufFiles(first)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        GgufFiles(alone)


HUGE = 1 << 60
ONE_TENSOR = [("a", (4,), 0, 0)]
DAMAGED: dict[str, tuple[bytes, str]] = {
    "no magic": (b"GGML" + bytes(40), "expected a GGUF file"),
    "empty": (b"", "ends at byte 4|expected a GGUF file"),
    "old version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported; supported: 2, 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "this file is big-endian"),
    "number of tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "tensors, expected at most 100000"),
    "number of fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "metadata fields, expected at most 100000"),
    "tensors that do not fit": (b"GGUF" + struct.pack("<IQQ", 3, 3, 0) + bytes(60), "3 tensors do not fit in the 68"),
    "fields that do not fit": (b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "9 metadata fields do not fit in the 0 bytes"),
    "field name": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(90),
        "a string of 1152921504606846976 bytes",
    ),
    "string": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IQ", 8, HUGE) + bytes(90),
        "field 'a' is a string of 1152921504606846976 bytes",
    ),
    "string outside": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IQ", 8, 95) + bytes(90),
        "field 'a' ends at byte",
    ),
    "array of numbers": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 6, 1 << 62) + bytes(90),
        "elements of metadata field 'a' do not fit in the 90 bytes",
    ),
    "array of strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", 9, 8, 12) + bytes(90),
        "strings of metadata field 'a' do not fit in the 90 bytes",
    ),
    "string of an array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQQ", 9, 8, 2, HUGE) + bytes(90),
        "field 'a' has a string that ends at byte",
    ),
    "arrays in arrays": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + string("a")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 6
        + bytes(90),
        "more than 4 deep",
    ),
    "type of a field": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", 13) + bytes(90),
        "field 'a' has type 13",
    ),
    "field twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (string("a") + struct.pack("<IB", 0, 1)) * 2 + bytes(90),
        "'a' occurs twice",
    ),
    "name not UTF-8": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"\xff\xfe") + struct.pack("<IB", 0, 1) + bytes(90),
        "not UTF-8",
    ),
    "tensor twice": (header({}, ONE_TENSOR * 2) + bytes(90), "tensor 'a' occurs twice"),
    "axes": (header({}, [("a", (1,) * 5, 0, 0)]) + bytes(90), "'a' has 5 axes, expected at most 4"),
    "type": (header({}, [("a", (4,), 41, 0)]) + bytes(90), "'a' has type Q1_0, which is not supported"),
    "unknown type": (header({}, [("a", (4,), 99, 0)]) + bytes(90), "'a' has type 99, which is not supported"),
    "rows of half a block": (header({}, [("a", (2, 48), 2, 0)]) + bytes(90), "'a' has rows of 48 elements, expected a"),
    "offset": (header({}, [("a", (4,), 0, 8)]) + bytes(90), "'a' begins at byte 8 of the data"),
    "offset outside": (header({}, [("a", (4,), 0, HUGE)]) + bytes(90), "truncated: tensor 'a' ends at byte"),
    "shape outside": (header({}, [("a", (HUGE, HUGE), 0, 0)]) + bytes(90), "truncated: tensor 'a' ends at byte"),
    "overlap": (
        header({}, [("a", (16,), 0, 0), ("b", (4,), 0, 32)]) + bytes(120),
        "tensor 'b' overlaps 'a'",
    ),
    "same place": (header({}, [("a", (4,), 0, 0), ("b", (4,), 0, 0)]) + bytes(120), "overlaps"),
    "alignment": (header({"general.alignment": 24}, []) + bytes(90), "general.alignment: expected a power of 2"),
    "no alignment": (header({"general.alignment": 0}, []) + bytes(90), "general.alignment: expected a power of 2"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    path = write(tmp_path, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    data = gguf_bytes(METADATA, TENSORS)
    used = data.rindex(bytes(range(68))) + 68  # the rest is padding
    for size in range(used):
        with pytest.raises(CheckpointError):
            GgufFile(write(tmp_path, data[:size]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_give_a_file_or_an_error(data: st.DataObject) -> None:
    original = bytearray(gguf_bytes(METADATA, TENSORS))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(original) - 9))
        original[at : at + 8] = data.draw(
            st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 300)).map(lambda number: struct.pack("<Q", number))
        )
    gguf_file.run(bytes(original))


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    num_tokens = 150_000
    metadata: dict[str, Any] = {
        "tokens": [f"token{index}" for index in range(num_tokens)],
        "merges": [f"a{index} b{index}" for index in range(num_tokens)],
        "scores": np.zeros(num_tokens, np.float32),
    }
    path = write(tmp_path, gguf_bytes(metadata, TENSORS))
    taken = list[float]()
    for _ in range(3):
        start = time.process_time()
        with GgufFile(path) as file:
            tokens, merges = list(file.metadata.strings("tokens")), list(file.metadata.strings("merges"))
        taken.append(time.process_time() - start)
        assert (tokens, merges) == (metadata["tokens"], metadata["merges"])
    assert min(taken) < 0.5


def test_fields_of_the_wrong_type_are_named(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path, gguf_bytes(METADATA, {}))) as file:
        metadata = file.metadata
    assert metadata.integer("llama.block_count") == 2 and metadata.number("llama.rope.freq_base") == 10000.0
    assert metadata.optional_integer("missing") is None and metadata.flag("yes", False)
    numbers = metadata.numbers("scores", 2)
    assert numbers is not None and numbers.tolist() == [0.5, -1.5] and metadata.numbers("missing", 2) is None
    for call, message in (
        (lambda: metadata.integer("missing"), "'missing': expected an integer, but it is missing"),
        (lambda: metadata.integer("yes"), "'yes': expected an integer, got True"),
        (lambda: metadata.number("tokens"), "'tokens': expected a number, got an array of 4"),
        (lambda: metadata.flag("negative", False), "'negative': expected true or false, got -5"),
        (lambda: metadata.text("scores"), "'scores': expected a string, got an array of 2"),
        (lambda: metadata.strings("scores"), "'scores': expected an array of strings"),
        (lambda: metadata.numbers("scores", 3), "'scores': expected an array of 3 numbers, got an array of 2"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
