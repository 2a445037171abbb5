"""``jaxserve bench serve``: its files are checked before the load, and a plot that fails loses nothing."""

import json
from pathlib import Path

import pytest

from jaxserve.cli import main
from tests.jaxserve.fake_openai import fake_server

SMALL = ("--random-input-len", "5", "--random-output-len", "3", "--num-prompts", "2", "--disable-tqdm")


def refused(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """What the command says that ends before the server was asked for anything."""
    with fake_server() as server:
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "serve", "--base-url", server.url, *map(str, flags)])
        assert not server.seen
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "plot: expected a file whose name ends in one of ."),
        ("a", "plot: expected a file whose name ends in one of"),
        ("nowhere/a.png", "cannot be written: No such file or directory"),
        ("folder.png", "cannot be written: Is a directory"),
    ],
)
def test_plots_are_checked_before_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    assert text in refused(capsys, "--plot", tmp_path / name)


def test_a_plot_where_nobody_may_write(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    if not Path("/proc/self").is_dir():
        pytest.skip("needs a directory in which not even root may write: /proc")
    assert "--plot: /proc/a.png cannot be written" in refused(capsys, "--plot", "/proc/a.png")


def test_results_are_checked_before_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    save, where = ("--save-result", "--result-dir"), ("--append-result", "--result-dir", tmp_path)
    assert "--result-dir: " in refused(capsys, *save, tmp_path / "file")
    assert "--result-dir: " in refused(capsys, *save, tmp_path / "file" / "more")
    assert "cannot be written: Is a directory" in refused(capsys, *where, "--result-filename", "folder")
    assert "cannot be written: No such file" in refused(capsys, *where, "--result-filename", "no/out.json")
    assert "cannot be written: No such file" in refused(capsys, *where, "--label", "a/b")


def test_what_is_read_is_checked_before_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent"
    for name in ("custom", "sharegpt", "trace"):
        text = refused(capsys, "--dataset-name", name, "--dataset-path", absent)
        assert f"--dataset-path: {absent} cannot be read: No such file" in text
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", "https://127.0.0.1:1", "--ssl-ca-certs", str(absent)])
    assert f"--ssl-ca-certs: {absent} cannot be read: No such file" in capsys.readouterr().err


def test_names_of_further_values_must_be_free(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("request_rate", "ttfts", "p99_itl_ms"):
        text = refused(capsys, "--save-result", "--metadata", f"{name}=5")
        assert f"--metadata: {name} is a key of the result" in text


def test_checks_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    kept = tmp_path / "all.jsonl"
    kept.write_text("before")
    where = ("--append-result", "--result-dir", tmp_path, "--result-filename")
    for name in ("all.jsonl", "new.json"):
        refused(capsys, "--plot", tmp_path / "a.png", *where, name, "--tokenizer", tmp_path / "absent")
    assert list(tmp_path.iterdir()) == [kept]
    assert kept.read_text() == "before"


def test_a_plot_that_fails_loses_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(figure.Figure, "savefig", fail)
    files = ("--plot", str(tmp_path / "a.png"), "--save-result", "--result-filename", str(tmp_path / "out.json"))
    with fake_server() as server, pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--base-url", server.url, *SMALL, *files])
    assert "a.png cannot be written: the disk is full" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())["completed"] == 2


def test_results_of_traces_are_named_for_their_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,5,2\n")
    data = ("--dataset-name", "trace", "--dataset-path", str(path), "--trace-speed", "2", "--disable-tqdm")
    with fake_server() as server:
        main(["bench", "serve", "--base-url", server.url, *data, "--save-result", "--result-dir", str(tmp_path)])
    (found,) = tmp_path.glob("openai-trace-2.0x-fake-*.json")
    assert json.loads(found.read_text())["num_prompts"] == 1
