"""Model names resolved against a local server that speaks the part of the hub's protocol that downloads use."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save

from checkpoints import CheckpointError, resolve_model


def safetensors(name: str) -> bytes:
    """A file with one tensor."""
    return save({name: np.zeros(2, np.float32)})


MAIN, TAGGED = "a" * 40, "b" * 40
CONFIG = {"config.json": b"{}", "tokenizer.model": b"spm", "chat_template.jinja": b"{{ x }}", "README.md": b"hello"}
REPOSITORIES: dict[str, dict[str, dict[str, bytes]]] = {
    "someone/model": {
        MAIN: {
            **CONFIG,
            "model.safetensors": b"weights of main",
            "pytorch_model.bin": b"bin",
            "modeling_x.py": b"import os",
            "weights.pt": b"pt",
            "consolidated.safetensors": b"again",
            "original/params.json": b"{}",
            "onnx/model.safetensors": b"onnx",
        },
        TAGGED: {**CONFIG, "model.safetensors": b"weights of v1"},
    },
    "baichuan/bins": {
        MAIN: {
            **CONFIG,
            "pytorch_model-00001-of-00001.bin": b"bin",
            "pytorch_model.bin.index.json": b"{}",
            "training_args.bin": b"pickle",
        }
    },
    "someone/adapted": {
        MAIN: {
            **CONFIG,
            "adapter_model.safetensors": safetensors("base_model.model.layers.0.q_proj.lora_A.weight"),
            "value_head.safetensors": safetensors("v_head.summary.weight"),
            "pytorch_model.bin": b"bin",
        },
        TAGGED: {**CONFIG, "weights.safetensors": safetensors("model.embed_tokens.weight"), "pytorch_model.bin": b"x"},
    },
    "someone/empty": {MAIN: {"config.json": b"{}", "model.onnx": b"onnx"}},
    "someone/model-GGUF": {
        MAIN: {
            "config.json": b"{}",
            "Model-Q4_K_M.gguf": b"GGUF q4",
            "Model-Q4_K_S.gguf": b"GGUF q4s",
            "model-q8_0.gguf": b"GGUF q8",
            "mmproj-Model-Q8_0.gguf": b"GGUF eyes",
            "BF16/Model-BF16-00001-of-00002.gguf": b"GGUF first",
            "BF16/Model-BF16-00002-of-00002.gguf": b"GGUF second",
            "Model-UD-IQ2_M.gguf": b"GGUF iq2",
            "Model-IQ2_M.gguf": b"GGUF other iq2",
            "modeling_x.py": b"import os",
        }
    },
}
REVISIONS = {"main": MAIN, "v1": TAGGED, MAIN: MAIN, TAGGED: TAGGED}


class Hub(BaseHTTPRequestHandler):
    """Model info, file tree, and files with their metadata headers."""

    requests: list[str] = []
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.requests.append(f"{self.command} {path} {self.headers.get('Authorization', '')}".strip())
        is_api = path.startswith("api/models/")
        owner, name, kind, revision, *rest = [*path.removeprefix("api/models/").split("/"), "", "", ""]
        repository = REPOSITORIES.get(f"{owner}/{name}")
        commit = REVISIONS.get(revision)
        if name == "gated":
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        elif name == "broken":
            self.send(500, b"{}", {})
        elif repository is None:
            self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif commit is None or commit not in repository:
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self.send_info(f"{owner}/{name}", kind, commit, repository[commit])
        else:
            content = repository[commit]["/".join(part for part in rest if part)]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            self.send(200, content, headers)

    def send_info(self, identity: str, kind: str, commit: str, files: dict[str, bytes]) -> None:
        if kind == "tree":
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in files.items()
            ]
            self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
        else:
            siblings = [{"rfilename": path} for path in files]
            info = {"id": identity, "_id": "0", "sha": commit, "siblings": siblings, "private": False, "tags": []}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(Hub, "requests", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    yield url
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_safetensors_are_preferred_and_code_never_comes(hub: str, tmp_path: Path) -> None:
    directory = resolve_model("someone/model", download_dir=str(tmp_path))
    assert names(directory) == {"config.json", "tokenizer.model", "chat_template.jinja", "model.safetensors"}
    assert (directory / "model.safetensors").read_bytes() == b"weights of main"
    assert directory.is_relative_to(tmp_path)


def test_revisions(hub: str, tmp_path: Path) -> None:
    for revision, content in {"v1": b"weights of v1", TAGGED: b"weights of v1", "main": b"weights of main"}.items():
        directory = resolve_model("someone/model", revision=revision, download_dir=str(tmp_path))
        assert (directory / "model.safetensors").read_bytes() == content
    with pytest.raises(CheckpointError, match="hub repository 'someone/model' has no revision 'v9'"):
        resolve_model("someone/model", revision="v9", download_dir=str(tmp_path))


def test_bins_come_where_there_are_no_safetensors(hub: str, tmp_path: Path) -> None:
    directory = resolve_model("baichuan/bins", download_dir=str(tmp_path))
    weights = {"pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"}
    assert names(directory) == {"config.json", "tokenizer.model", "chat_template.jinja", *weights}


def test_bins_come_beside_safetensors_without_a_model(hub: str, tmp_path: Path) -> None:
    got = names(resolve_model("someone/adapted", download_dir=str(tmp_path)))
    assert {"adapter_model.safetensors", "value_head.safetensors", "pytorch_model.bin"} < got
    got = names(resolve_model("someone/adapted", revision="v1", download_dir=str(tmp_path)))
    assert "weights.safetensors" in got and "pytorch_model.bin" not in got


def test_the_load_format_decides_what_comes(hub: str, tmp_path: Path) -> None:
    for number, (load_format, weights) in enumerate(
        {"safetensors": {"model.safetensors"}, "pt": {"pytorch_model.bin"}, "dummy": set[str]()}.items()
    ):
        directory = resolve_model("someone/model", download_dir=str(tmp_path / str(number)), load_format=load_format)
        assert names(directory) == {"config.json", "tokenizer.model", "chat_template.jinja", *weights}
    with pytest.raises(CheckpointError, match=r"'baichuan/bins' has no \*\.safetensors weights; it has "):
        resolve_model("baichuan/bins", download_dir=str(tmp_path), load_format="safetensors")


def test_a_second_time_downloads_nothing(hub: str, tmp_path: Path) -> None:
    first = resolve_model("someone/model", download_dir=str(tmp_path))
    Hub.requests.clear()
    assert resolve_model("someone/model", download_dir=str(tmp_path)) == first
    assert not [request for request in Hub.requests if "/resolve/" in request]


def test_offline_after_a_download(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model("someone/model", download_dir=str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_model("someone/model", download_dir=str(tmp_path)) == first


def test_offline_without_a_download(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="'someone/model' has not been downloaded yet and the hub cannot be"):
        resolve_model("someone/model", download_dir=str(tmp_path))
    assert Hub.requests == []


def test_a_hub_that_does_not_answer(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="'x/y' at revision 'main' has not been downloaded yet and the hub"):
        resolve_model("x/y", revision="main", download_dir=str(tmp_path))


def test_the_token_is_sent(hub: str, tmp_path: Path) -> None:
    resolve_model("someone/model", download_dir=str(tmp_path), token="hf_secret")
    assert Hub.requests and all(request.endswith("Bearer hf_secret") for request in Hub.requests)


def test_refusals(hub: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hub repository 'meta/gated' is gated: accept its terms"):
        resolve_model("meta/gated", download_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match="'no/such' is neither an existing directory nor a hub repository"):
        resolve_model("no/such", download_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match="has neither .*safetensors nor pytorch_model.* it has config.json"):
        resolve_model("someone/empty", download_dir=str(tmp_path))


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models") == tmp_path / "models"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models") == Path("models")
    with pytest.raises(CheckpointError, match="is a directory, so revision='main' does not apply"):
        resolve_model("models", revision="main")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file; expected a model directory, a .gguf file or a hub id"):
        resolve_model("file")


def test_gguf_files(tmp_path: Path) -> None:
    file = tmp_path / "model-q8_0.gguf"
    file.touch()
    assert resolve_model(str(tmp_path)) == resolve_model(str(file)) == file
    with pytest.raises(CheckpointError, match="load_format='safetensors' reads no GGUF files"):
        resolve_model(str(file), load_format="safetensors")
    with pytest.raises(CheckpointError, match="is a file, so revision='main' does not apply"):
        resolve_model(str(file), revision="main")
    (tmp_path / "mmproj-model-f16.gguf").touch()
    assert resolve_model(str(tmp_path)) == file
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == file
    assert resolve_model(str(tmp_path), load_format="dummy") == tmp_path
    (tmp_path / "model-q4_0-00001-of-00002.gguf").touch()
    with pytest.raises(
        CheckpointError, match="2 GGUF files: pass one of them: model-q4_0-00001-of-00002.gguf, model-q8"
    ):
        resolve_model(str(tmp_path))
    with pytest.raises(CheckpointError, match="parts of the file are missing: model-q4_0-00002-of-00002.gguf"):
        resolve_model(str(tmp_path / "model-q4_0-00001-of-00002.gguf"))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_gguf_files_of_repositories(hub: str, tmp_path: Path) -> None:
    def get(tag: str) -> Path:
        return resolve_model(f"someone/model-GGUF:{tag}", download_dir=str(tmp_path / tag))

    file = get("Q4_K_M")
    assert file.read_bytes() == b"GGUF q4" and names(file.parent) == {"config.json", "Model-Q4_K_M.gguf"}
    assert get("Q8_0").read_bytes() == get("q8_0").read_bytes() == b"GGUF q8"
    first = get("BF16")
    assert first.read_bytes() == b"GGUF first"
    assert names(first.parent) == {"Model-BF16-00001-of-00002.gguf", "Model-BF16-00002-of-00002.gguf"}
    assert get("UD-IQ2_M").read_bytes() == b"GGUF iq2"
    with pytest.raises(CheckpointError, match="several GGUF files have the tag IQ2_M: Model-IQ2_M.gguf, Model-UD-IQ2"):
        get("IQ2_M")
    assert get("Model-IQ2_M").read_bytes() == b"GGUF other iq2"
    with pytest.raises(CheckpointError, match="no GGUF file with the tag Q5_K; it has BF16/Model-BF16-00001-of-00002"):
        get("Q5_K")
    with pytest.raises(CheckpointError, match="has GGUF files: pass the tag of one, as in someone/model-GGUF:Q4_K_M"):
        resolve_model("someone/model-GGUF", download_dir=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="'no/such' is neither an existing directory nor a hub repository"):
        resolve_model("no/such:Q8_0", download_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/dir", "./model", "a/b/c", "", "a b", "../x", "https://x.y/z", "a//b"])
def test_what_is_neither_directory_nor_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="neither an existing directory nor a GGUF file nor a hub id such as"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["a/b--c", "a/b..c", "a/" + "b" * 100])
def test_ids_that_the_hub_does_not_allow(name: str) -> None:
    with pytest.raises(CheckpointError, match="neither an existing directory nor a valid hub id"):
        resolve_model(name)
