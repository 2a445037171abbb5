"""Prompts and output of benchmarks."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Return prompts of random token ids, excluding the first few ids, which are often special tokens."""
    rng = np.random.default_rng(seed)
    low = min(256, vocab_size // 2)
    return [{"prompt_token_ids": rng.integers(low, vocab_size, length).tolist()} for _ in range(count)]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the output of results."""
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")
    parser.add_argument("--output-json", metavar="FILE", help="also write the result to a file")


def report(options: argparse.Namespace, figures: dict[str, Any], lines: list[str]) -> None:
    """Print the result as text or JSON, and write it to a file if requested."""
    print(json.dumps(figures) if options.json else "\n".join(lines), flush=True)
    if options.output_json is not None:
        Path(options.output_json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
