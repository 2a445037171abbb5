"""The progress bar goes to stderr and stays away from short loads."""

import pytest

from checkpoints import progress_bar


def test_short_loads_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(100) as show:
        show(50, 100)
        show(100, 100)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""


def test_forced_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(3 << 20, "Reading", is_forced=True) as show:
        show(1 << 20, 3 << 20)
        show(3 << 20, 3 << 20)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Reading: 100%" in captured.err and "3.00M/3.00M" in captured.err
