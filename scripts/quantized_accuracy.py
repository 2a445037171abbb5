"""Measure what quantized weights cost in accuracy: perplexity, and the divergence from the same weights in float32.

    python scripts/quantized_accuracy.py --model CHECKPOINT --text FILE

Each method writes the float checkpoint quantized (``jaxserve convert --quantization``). The text is then scored with
those weights decoded to float32, which is the reference, and with the weights as they are stored: activations in
float32, in bfloat16, and rounded to 8 bits. The divergence is the mean over positions of KL(reference || stored), over
the whole vocabulary.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from jaxtyping import Float

from checkpoints.quantized.on_load import METHODS
from jaxserve import LLM, ConfigError, SamplingParams
from jaxserve.cli import main as jaxserve

_CONTEXT = 256  # tokens that are scored together
_STORED: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quantization_config": {"weights": "stored"}},
    "bfloat16": {"dtype": "bfloat16", "quantization_config": {"weights": "stored"}},
    "int8": {"dtype": "float32", "quantization_config": {"weights": "stored", "activations": "int8"}},
}


def _scores(
    model: Path, text: str, num_tokens: int, **settings: Any
) -> tuple[np.ndarray, Float[np.ndarray, "positions vocab"]]:
    """Return the tokens that follow each position of a text, and the log-probabilities of all tokens there."""
    with LLM(
        str(model),
        warm_up=False,
        max_model_len=_CONTEXT,
        max_num_seqs=2,
        max_logprobs=-1,
        enable_prefix_caching=False,
        **settings,
    ) as llm:
        ids = llm.get_tokenizer().encode(text)[:num_tokens]
        prompts = [ids[start : start + _CONTEXT - 1] for start in range(0, len(ids), _CONTEXT - 1)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
        outputs = llm.generate([prompt for prompt in prompts if len(prompt) > 1], params)
    following: list[int] = []
    rows: list[np.ndarray] = []
    for output in outputs:
        assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
        following += output.prompt_token_ids[1:]
        for found in output.prompt_logprobs[1:]:
            assert found is not None
            rows.append(np.array([found[token].logprob for token in sorted(found)], np.float64))
    return np.array(following), np.stack(rows)


def _perplexity(following: np.ndarray, logprobs: Float[np.ndarray, "positions vocab"]) -> float:
    return float(np.exp(-logprobs[np.arange(len(following)), following].mean()))


def _divergence(reference: Float[np.ndarray, "positions vocab"], found: Float[np.ndarray, "positions vocab"]) -> float:
    return max(0.0, float((np.exp(reference) * (reference - found)).sum(axis=1).mean()))  # but for what float32 rounds


def _row(model: Path, method: str, text: str, num_tokens: int) -> str:
    """Return the line of the table of a method."""
    with tempfile.TemporaryDirectory() as folder:
        quantized = Path(folder) / "model"
        jaxserve(["convert", str(model), str(quantized), "--format", "safetensors", "--quantization", method])
        decoded = {"weights": "decoded"}
        following, reference = _scores(quantized, text, num_tokens, dtype="float32", quantization_config=decoded)
        cells = [method, f"{_perplexity(following, reference):.4f}"]
        for settings in _STORED.values():
            try:
                _, found = _scores(quantized, text, num_tokens, **settings)
            except ConfigError:  # codes that rounded rows are not multiplied with
                cells += ["-", "-"]
                continue
            cells += [f"{_perplexity(following, found):.4f}", f"{_divergence(reference, found):.1e}"]
    return " | ".join(cells)


def main(arguments: list[str] | None = None) -> None:
    """Score the methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a float checkpoint in Hugging Face's format")
    parser.add_argument("--text", type=Path, required=True, help="the text that is scored")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text (default: %(default)s)")
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    following, floats = _scores(options.model, text, options.tokens, dtype="float32")
    print(f"float32, not quantized: perplexity {_perplexity(following, floats):.4f} over {len(following)} tokens\n")
    names = " | ".join(f"{name}: perplexity | KL" for name in _STORED)
    print(f"| method | decoded: perplexity | {names} |")
    print(f"|{'---|' * (2 + 2 * len(_STORED))}", flush=True)
    for method in options.methods:
        print(f"| {_row(options.model, method, text, options.tokens)} |", flush=True)


if __name__ == "__main__":
    main()
