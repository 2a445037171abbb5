"""The fuzz test of speculative decoding: what it draws, what it detects, and a part of it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from jaxserve.sampling.verification import Verification
from scripts import fuzz_drafts
from scripts.fuzzing.checkpoints import FAMILIES
from scripts.fuzzing.configurations import Configuration, draw
from scripts.fuzzing.requests import draw_requests

SMALL = dataclasses.replace(
    draw(0, 0),
    family="llama",
    is_foreseeable=False,
    settings={
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
        "block_size": 8,
        "compile_sizes": {"decode": [4], "mixed": [16]},
        "few_pages": 1.0,
        "dtype": "float32",
        "scheduling_policy": "priority",
        "compilation_cache_dir": "",
    },
    speculation={"method": "ngram", "num_speculative_tokens": 3, "enable_adaptive_verification": False},
    replay=0.7,
    reshard=None,
    concurrency=6,
)


KEEP = Verification.keep


def keep_all(self: Verification, tokens: Any) -> Any:
    """What is kept where each draft equals the token sampled before it."""
    return KEEP(self._replace(followed=jnp.roll(tokens, 1)), tokens)


def run(arguments: list[str], output: Path) -> list[dict[str, Any]]:
    """The lines that the script has written."""
    fuzz_drafts.main([*arguments, "--output", str(output)])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_kind_is_drawn() -> None:
    """Every method, family, layout and option, among few hundred configurations."""
    drawn = [draw(0, number) for number in range(400)]
    methods = {each.speculation["method"] if each.replay is None else "replay" for each in drawn}
    assert methods == {"ngram", "suffix", "grammar", "replay", "draft_model", "eagle", "eagle3", "dflash", "mtp"}
    assert {each.family for each in drawn} == set(FAMILIES)
    layouts = {each.settings.get("layout") for each in drawn}
    assert {"split_logits", "sequence_parallel", "context_parallel", "expert_gather", "expert_all_to_all"} < layouts
    asked = draw_requests(drawn[0], 300)
    assert any(each.aborts_after for each in asked) and any(each.request.pooling for each in asked)
    options = {name for each in asked for name in repr(each.request.params).replace("(", " ").split() if "=" in name}
    names = {option.split("=")[0].rstrip(",") for option in options}
    assert {"n", "min_p", "stop", "bad_words", "structured_outputs", "min_tokens", "prompt_logprobs"} < names


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its exit status says whether anything differs."""
    found: dict[str, Any] = {"differences": [], "problems": [], "requests": 40}

    def compared(configuration: Configuration, num_requests: int) -> dict[str, Any]:
        return {**found, "requests": num_requests}

    monkeypatch.setattr(fuzz_drafts, "_compare", compared)
    output, arguments = tmp_path / "lines", ["--each", "40", "--requests"]
    assert [line["configuration"] for line in run([*arguments, "100"], output)] == [0, 1, 2]
    assert len(run([*arguments, "100"], output)) == 3
    found["differences"] = [{"request": "3", "what": "token 7", "asked": "…"}]
    assert [line["configuration"] for line in run([*arguments, "160"], output)] == [0, 1, 2, 3]
    assert fuzz_drafts.main([*arguments, "160", "--output", str(output)]) == 1
    with pytest.raises(SystemExit, match="use another file for each seed"):
        run(["--seed", "1"], output)


@pytest.mark.parametrize("breaks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_wrong_drafts_that_are_kept_are_found(breaks: bool) -> None:
    with mock.patch.object(Verification, "keep", keep_all if breaks else KEEP):
        line = fuzz_drafts.run_configuration(SMALL, 16)
    assert not line["problems"] and "refused" not in line, line
    assert bool(line["differences"]) is breaks, line["differences"]
    assert line["preemptions"] > 0 and 0 < line["accepted"] <= line["drafted"]


@pytest.mark.slow
def test_random_configurations_have_the_same_outputs(tmp_path: Path, repository: Path) -> None:
    """With the compiler's settings of the script."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    arguments = ["--seed", "2", "--requests", "300", "--each", "60", "--output", str(tmp_path / "lines")]
    command = [sys.executable, "scripts/fuzz_drafts.py", *arguments]
    done = subprocess.run(command, cwd=repository, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 requests" in done.stdout and "0 requests differ, 0 other problems" in done.stdout
