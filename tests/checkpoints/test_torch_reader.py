"""`.bin` files against torch, damaged archives, and pickles that try to run something."""

import io
import os
import pickle
import pickletools
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import CheckpointError
from checkpoints.tensor_info import whole_index
from checkpoints.torch_reader import TorchReader


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch, the oracle, is not installed")


def as_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor's values, bfloat16 and float8 included."""
    tensor = tensor.detach().contiguous()
    try:
        return tensor.numpy()
    except TypeError:
        name = str(tensor.dtype).removeprefix("torch.")
        import torch

        integer = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(integer).numpy().view(getattr(ml_dtypes, name))


def check(path: Path, expected: dict[str, Any]) -> None:
    with TorchReader(path) as reader:
        assert set(reader.tensors) == set(expected)
        for name, tensor in expected.items():
            value = as_numpy(tensor)
            assert reader.tensors[name].shape == value.shape
            assert reader.tensors[name].dtype == value.dtype
            got = reader.read(name, whole_index(value.shape))
            assert got.tobytes() == value.tobytes(), name
            part = tuple(slice(length // 3, length - length // 4) for length in value.shape)
            assert reader.read(name, part).tobytes() == np.ascontiguousarray(value[part]).tobytes(), name


DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2 uint16 uint32 uint64"
)


def test_dtypes_and_shapes(torch: Any, tmp_path: Path) -> None:
    state = OrderedDict()
    for number, name in enumerate(DTYPE_NAMES.split()):
        for shape in [(), (1,), (5, 7), (2, 3, 4), (0, 4)]:
            values = torch.randint(0, 2 if name == "bool" else 100, shape)
            state[f"{number}.{name}.{len(shape)}"] = values.to(getattr(torch, name))
    torch.save(state, tmp_path / "m.bin")
    check(tmp_path / "m.bin", state)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_shared_storages_ties_and_parameters(torch: Any, tmp_path: Path, protocol: int) -> None:
    base = torch.randn(40, 30)
    fused = torch.randn(96, 32).to(torch.bfloat16)
    state = {
        "base": base,
        "transposed": base.t(),
        "rows": base[5:20],
        "columns": base[:, 3:17],
        "every_second": base[::2, 1::3],
        "expanded": base[:, :1].expand(40, 6),
        "flat": base.flatten()[7:],
        "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(base),
        "tied": torch.nn.Parameter(base),
        "q": fused[:32],
        "k": fused[32:64],
        "one": base[3, 4],
        "none_left": base[:0],
    }
    torch.save(state, tmp_path / "m.bin", pickle_protocol=protocol)
    assert (tmp_path / "m.bin").stat().st_size < 40_000
    check(tmp_path / "m.bin", state)


def test_a_module_with_buffers_and_versions(torch: Any, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    assert state._metadata
    torch.save(state, tmp_path / "m.bin")
    check(tmp_path / "m.bin", state)


def test_a_large_transposed_tensor_is_read_in_parts(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from checkpoints import file_ranges

    monkeypatch.setattr(file_ranges, "SCRATCH_BYTES", 1000)
    base = torch.randn(300, 200)
    state = {"base": base, "transposed": base.t()}
    torch.save(state, tmp_path / "m.bin")
    check(tmp_path / "m.bin", state)


def test_compressed_archives(torch: Any, tmp_path: Path) -> None:
    base = torch.randn(20, 30)
    state = {"a": base, "b": base.t()[2:7], "c": torch.ones(3, dtype=torch.int8)}
    torch.save(state, tmp_path / "stored.bin")
    repack(tmp_path / "stored.bin", tmp_path / "m.bin", compression=zipfile.ZIP_DEFLATED)
    check(tmp_path / "m.bin", state)


def test_the_format_before_torch_1_6(torch: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"m.bin: not a torch checkpoint in the zip format of torch 1\.6"):
        TorchReader(tmp_path / "m.bin")


def test_every_truncation_is_refused(torch: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 5)}, tmp_path / "whole.bin")
    content = (tmp_path / "whole.bin").read_bytes()
    for count in range(0, len(content), 7):
        (tmp_path / "m.bin").write_bytes(content[:count])
        with pytest.raises(CheckpointError, match="m.bin: "):
            TorchReader(tmp_path / "m.bin")


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: [torch.ones(2)],
        lambda torch: {"epoch": 3, "w": torch.ones(2)},
        lambda torch: {"model": {"w": torch.ones(2)}},
        lambda torch: {3: torch.ones(2)},
    ],
)
def test_other_things_than_state_dicts(torch: Any, tmp_path: Path, make: Callable[[Any], Any]) -> None:
    torch.save(make(torch), tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="m.bin: expected a dictionary of tensors"):
        TorchReader(tmp_path / "m.bin")


def test_tensors_of_other_kinds_are_refused_by_name(torch: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"pickle refers to 'torch\._utils\._rebuild_sparse_tensor'"):
        TorchReader(tmp_path / "m.bin")
    torch.save({"w": torch.ones(2, dtype=torch.complex64)}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"pickle refers to 'torch\.ComplexFloatStorage'"):
        TorchReader(tmp_path / "m.bin")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match=r"pickle refers to 'torch\.nn\.modules\.linear\.Linear'"):
        TorchReader(tmp_path / "m.bin")


# ------------------------------------------------------------- archives made by hand, no torch needed


def repack(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **changes: bytes | None) -> None:
    """Copy an archive; `changes` replaces entries by their last path component (None: leave out)."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            content = changes.get(entry.filename.rpartition("/")[2].partition(".")[0], old.read(entry))
            if content is not None:
                new.writestr(entry.filename, content)


def archive(path: Path, pickled: bytes, storage: bytes = bytes(24), **entries: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", pickled)
        file.writestr("m/data/0", storage)
        for name, content in entries.items():
            file.writestr(f"m/{name}", content)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integers(*values: int) -> bytes:
    """A tuple of integers."""
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def storage(key: str = "0", kind: str = "FloatStorage", length: int = 6) -> bytes:
    persistent_id = text("storage") + b"ctorch\n" + kind.encode() + b"\n" + text(key) + text("cpu")
    return b"(" + persistent_id + b"J" + struct.pack("<i", length) + b"tQ"


def tensor(of: bytes, offset: int = 0, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1)) -> bytes:
    arguments = of + b"J" + struct.pack("<i", offset) + integers(*shape) + integers(*strides) + b"\x89N"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def state_dict(value: bytes) -> bytes:
    return b"\x80\x02}" + text("w") + value + b"s."


def test_the_handmade_archive_is_good(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    path = archive(tmp_path / "m.bin", state_dict(tensor(storage())), values.tobytes())
    with TorchReader(path) as reader:
        np.testing.assert_array_equal(reader.read("w", whole_index((2, 3))), values.reshape(2, 3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tensor(storage(), offset=1), r"tensor 'w': reaches byte 28 of a storage of 24 bytes \(offset 1"),
        (tensor(storage(), strides=(4, 1)), "tensor 'w': reaches byte 28 of a storage of 24 bytes"),
        (tensor(storage(length=7)), "tensor 'w': storage '0' holds 24 bytes, expected 28"),
        (tensor(storage(key="1")), "tensor 'w': storage '1' is not in the archive"),
        (tensor(storage(key="../data.pkl")), "storage '../data.pkl' is not in the archive"),
        (tensor(storage(), shape=(2, -3)), "the pickle is damaged: a size, stride or offset is not an integer"),
        (tensor(storage(), offset=-1), "the pickle is damaged: a size, stride or offset is not an integer"),
        (tensor(storage(), shape=(6,)), "the pickle is damaged: a tensor of rank 1 with 2 strides"),
        (tensor(storage(), shape=(1,) * 40, strides=(1,) * 40), "the pickle is damaged: a tensor of rank 40"),
        (tensor(b"N"), "the pickle is damaged: expected a StorageRef, got a NoneType"),
        (storage(kind="QInt8Storage"), r"pickle refers to 'torch\.QInt8Storage', which is not a tensor or a container"),
        (storage(length=-1), "a size, stride or offset is not an integer"),
        (b"NQ", "the pickle is damaged: a persistent id is not a storage"),
        (b"(" + text("module") + b"NNNNtQ", "the pickle is damaged: a persistent id is not a storage"),
        (b"ctorch\nFloatStorage\n)R", r"the pickle is damaged: a call of torch\.FloatStorage with 0 arguments"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R", "a call of torch._utils._rebuild_tensor_v2 with 0 arguments"),
        (b"ccollections\nOrderedDict\n(]tR", r"a call of collections\.OrderedDict with 1 arguments"),
        (b"ccollections\nOrderedDict\n]R", "the pickle is damaged: expected a tuple, got a list"),
        (b"N)R", "the pickle is damaged: a call of a NoneType with 0 arguments"),
        (b"]}b", "the pickle is damaged: expected a dict, got a list"),
        (b"}Na", "the pickle is damaged: expected a list, got a dict"),
        (b"})Ns", "the pickle is damaged: a dictionary key of type tuple"),
        (b"t", "the pickle is damaged: IndexError"),
        (b"0000", "the pickle is damaged: IndexError"),
        (b"h\x05", "the pickle is damaged: KeyError"),
        (b"\xff", "the pickle is damaged: ValueError"),
        (b"I" + b"9" * 5000 + b"\n", "the pickle is damaged: ValueError"),
        (b"\x8f", "pickle uses EMPTY_SET, which no tensor file needs"),
        (b"ccollections\nOrderedDict\n)\x81", "pickle uses NEWOBJ, which no tensor file needs"),
        (b"(ccollections\nOrderedDict\no", "pickle uses OBJ, which no tensor file needs"),
        (b"(icollections\nOrderedDict\n", "pickle uses INST, which no tensor file needs"),
        (b"\x82\x01", "pickle uses EXT1, which no tensor file needs"),
        (b"Psome\n", "pickle uses PERSID, which no tensor file needs"),
    ],
)
def test_bad_pickles(tmp_path: Path, value: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"m.bin: .*{message}"):
        TorchReader(archive(tmp_path / "m.bin", state_dict(value)))


def test_a_pickle_without_an_end(tmp_path: Path) -> None:
    for pickled in (b"", b"\x80\x02}", state_dict(tensor(storage()))[:-1]):
        with pytest.raises(CheckpointError, match="m.bin: the pickle is damaged"):
            TorchReader(archive(tmp_path / "m.bin", pickled))


def test_nested_tuples_that_double_end_quickly(tmp_path: Path) -> None:
    """Hashing, printing or comparing such a value would take 2**200 steps."""
    bomb = b")" + b"2\x86" * 200
    for value in (bomb, bomb + b")R", b"}" + bomb + b"Ns", b"(" + bomb + b"NNNNtQ"):
        with pytest.raises(CheckpointError, match="m.bin: "):
            TorchReader(archive(tmp_path / "m.bin", state_dict(value)))


class Reduced:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def attacks(command: str) -> dict[str, bytes]:
    """Pickles of every kind that run a command when `pickle.loads` reads them."""
    argument = text(command)
    system = text("posix") + text("system") + b"\x93"
    return {
        **{f"reduce, protocol {protocol}": pickle.dumps(Reduced(command), protocol) for protocol in range(6)},
        "global": b"\x80\x02cposix\nsystem\n(" + argument + b"tR.",
        "stack global": b"\x80\x04(" + system + argument + b"\x85R.",
        "inst": b"(" + argument + b"iposix\nsystem\n.",
        "obj": b"(cposix\nsystem\n" + argument + b"o.",
        "newobj": b"\x80\x02cbuiltins\neval\n" + text(f"__import__('os').system({command!r})") + b"\x85\x81.",
        "memo": b"\x80\x04" + text("posix") + b"\x940" + text("system") + b"\x940h\x00h\x01\x93" + argument + b"\x85R.",
        "renamed in the memo": b"\x80\x02cposix\nsystem\nq\x000ccollections\nOrderedDict\n0h\x00"
        + argument
        + b"\x85R.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\npath\n" + text("os") + b"\x86R.",
        "dotted name": b"\x80\x04" + text("torch._utils") + text("os.system") + b"\x93" + argument + b"\x85R.",
        "inside an allowed name": b"\x80\x04" + text("collections") + text("_sys.modules") + b"\x93.",
        "in a state dict": state_dict(b"cposix\nsystem\n" + argument + b"\x85R"),
        "as hooks of a tensor": state_dict(tensor(storage())[:-3] + b"cposix\nsystem\n" + argument + b"\x85RtR"),
        "as a storage": state_dict(storage().replace(b"ctorch\nFloatStorage\n", b"cposix\nsystem\n")),
        "behind stop": b"\x80\x02cposix\nsystem\n.",
    }


@pytest.mark.parametrize("kind", list(attacks("true")))
def test_attacks_are_refused_by_name_and_nothing_runs(tmp_path: Path, kind: str) -> None:
    proof = tmp_path / "ran"
    path = archive(tmp_path / "m.bin", attacks(f"touch {proof}")[kind])
    with pytest.raises(
        CheckpointError, match=r"m.bin: pickle refers to '[\w.]+', which is not a tensor or a container"
    ):
        TorchReader(path)
    assert not proof.exists()


def test_the_attacks_are_real(tmp_path: Path) -> None:
    for number, kind in enumerate(["reduce, protocol 4", "global", "stack global", "inst", "memo"]):
        proof = tmp_path / f"ran{number}"
        pickle.loads(attacks(f"touch {proof}")[kind])
        assert proof.exists(), kind


def test_only_data_opcodes_are_interpreted() -> None:
    """A new opcode in a later Python is refused until someone has looked at it."""
    from checkpoints import pickle_machine
    from checkpoints.pickle_machine import Interpretation, PickleMachine

    refused = "PERSID EXT1 EXT2 EXT4 EMPTY_SET ADDITEMS FROZENSET NEWOBJ NEWOBJ_EX INST OBJ BYTEARRAY8 "
    refused += "NEXT_BUFFER READONLY_BUFFER"
    machine = PickleMachine(Interpretation(lambda module, name: None, lambda value: value, lambda call, values: None))
    known = (
        {*machine._actions, *pickle_machine._LITERALS, *pickle_machine._CONSTANTS, *pickle_machine._TUPLES}
        | {*pickle_machine._PUTS, *pickle_machine._GETS, *pickle_machine._SKIPPED}
        | {"GLOBAL", "INST", "STOP"}
    )
    assert {opcode.name for opcode in pickletools.opcodes} - known == {*refused.split()} - {"INST"}


def test_damaged_archives(tmp_path: Path) -> None:
    good = state_dict(tensor(storage()))
    path = archive(tmp_path / "m.bin", good, byteorder=b"big")
    with pytest.raises(CheckpointError, match="tensors are in big-endian byte order"):
        TorchReader(path)
    with zipfile.ZipFile(tmp_path / "n.bin", "w") as file:
        file.writestr("m/other.pkl", good)
    with pytest.raises(CheckpointError, match=r"n.bin: expected one data\.pkl in the archive, found 0"):
        TorchReader(tmp_path / "n.bin")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="m.bin: damaged or truncated zip archive"):
        TorchReader(path)
    with zipfile.ZipFile(tmp_path / "o.bin", "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("m/data.pkl", good)
    with pytest.raises(
        CheckpointError, match=r"entry 'm/data\.pkl' has compression method 12, expected stored or deflated"
    ):
        TorchReader(tmp_path / "o.bin")


def test_an_entry_whose_checksum_is_wrong(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.bin", state_dict(tensor(storage())))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"storage", b"stomage"))
    with pytest.raises(CheckpointError, match=r"m.bin: entry 'm/data\.pkl' is damaged: Bad CRC-32"):
        TorchReader(path)


def test_an_entry_that_lies_outside_the_file(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.bin", state_dict(tensor(storage())))
    content = bytearray(path.read_bytes())
    name_length_at = content.find(b"m/data/0") - 4
    content[name_length_at : name_length_at + 2] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="tensor 'w': entry 'm/data/0' of the archive reaches outside the file"):
        TorchReader(path)


def test_a_stated_size_that_deflate_cannot_reach(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.bin", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/data.pkl", state_dict(tensor(storage())))
        file.writestr("m/data/0", bytes(24))
    content = bytearray((tmp_path / "m.bin").read_bytes())
    directory_entry = content.rfind(b"PK\x01\x02")
    content[directory_entry + 24 : directory_entry + 28] = struct.pack("<I", 1 << 31)
    (tmp_path / "m.bin").write_bytes(content)
    with TorchReader(tmp_path / "m.bin") as reader, pytest.raises(CheckpointError, match="declares 2147483648 bytes"):
        reader.read("w", whole_index((2, 3)))


def deflated(path: Path, num_bytes: int) -> Path:
    """An archive whose storage of six floats is an entry of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/data.pkl", state_dict(tensor(storage())))
        file.writestr("m/data/0", bytes(num_bytes))
    return path


def test_an_entry_inflates_no_further_than_its_storage(tmp_path: Path) -> None:
    with TorchReader(deflated(tmp_path / "m.bin", 100 << 20)) as reader:
        tracemalloc.start()
        try:
            assert not reader.read("w", whole_index((2, 3))).any()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 1 << 20


def test_an_entry_that_inflates_to_less_than_it_declares(tmp_path: Path) -> None:
    path = deflated(tmp_path / "m.bin", 20)
    content = bytearray(path.read_bytes())
    directory_entry = content.rfind(b"PK\x01\x02")
    content[directory_entry + 24 : directory_entry + 28] = struct.pack("<I", 24)
    path.write_bytes(content)
    with TorchReader(path) as reader, pytest.raises(CheckpointError, match=r"entry 'm/data/0' is damaged"):
        reader.read("w", whole_index((2, 3)))


def test_a_pickle_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.torch_reader.MAX_PICKLE_BYTES", 50)
    with pytest.raises(CheckpointError, match=r"m/data\.pkl' of the archive declares \d+ bytes, expected at most"):
        TorchReader(archive(tmp_path / "m.bin", state_dict(tensor(storage()))))


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    good = state_dict(tensor(storage()))
    path = tmp_path / "m.bin"
    for _ in range(2000):
        damaged = bytearray(good)
        for position in random.integers(0, len(good), 3):
            damaged[position] = random.integers(0, 256)
        archive(path, bytes(damaged))
        try:
            with TorchReader(path) as reader:
                for name, info in reader.tensors.items():
                    reader.read(name, whole_index(info.shape))
        except CheckpointError:
            continue


def test_writing_is_not_needed() -> None:
    """The pickles above are what torch writes: its own unpickler of the handmade state dict sees the same calls."""
    calls: list[str] = []

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            calls.append(f"{module}.{name}")
            return lambda *arguments: arguments

        def persistent_load(self, pid: Any) -> Any:
            return pid[0]

    Listing(io.BytesIO(state_dict(tensor(storage())))).load()
    assert calls == ["torch._utils._rebuild_tensor_v2", "torch.FloatStorage"]
