"""Prompts and output of benchmarks."""

import argparse
import json
from typing import Any

import numpy as np

from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.text_files import check_output_file, write_text


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Return prompts of random token ids, excluding the first few ids, which are often special tokens."""
    rng = np.random.default_rng(seed)
    low = min(256, vocab_size // 2)
    return [{"prompt_token_ids": rng.integers(low, vocab_size, length).tolist()} for _ in range(count)]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the output of results."""
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    parser.add_argument("--output-json", metavar="FILE", help="also write the result to a file")


def check_output(options: argparse.Namespace) -> None:
    """Check that the result can be written, before it is measured.

    Raises:
        ConfigError: The file of ``--output-json`` cannot be written.
    """
    if options.output_json is not None:
        check_output_file("--output-json", options.output_json)


def draft_figures(drafts: DraftTotals) -> tuple[dict[str, float], list[str]]:
    """Return figures and lines about the drafts of a run; none without speculative decoding."""
    if not drafts.accepted:
        return {}, []
    figures = {
        "num_drafts": drafts.num_drafts,
        "num_draft_tokens": drafts.num_tokens,
        "num_accepted_tokens": drafts.num_accepted,
        "mean_acceptance_length": drafts.mean_length,
        "draft_acceptance_rate": drafts.acceptance_rate,
    }
    line = (
        f"Mean acceptance length: {drafts.mean_length:.2f} "
        f"({drafts.num_accepted:.0f} of {drafts.num_tokens:.0f} draft tokens accepted)"
    )
    return figures, [line]


def report(options: argparse.Namespace, figures: dict[str, Any], lines: list[str]) -> None:
    """Write the result to a file if requested, and print it as text or JSON."""
    if options.output_json is not None:
        write_text("--output-json", options.output_json, json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures) if options.json else "\n".join(lines), flush=True)
