"""Measure what quantized weights cost in accuracy: perplexity, and the divergence from the same weights in float32.

    python scripts/quantized_accuracy.py --model CHECKPOINT --text FILE
    python scripts/quantized_accuracy.py --quantized FILE.gguf DIRECTORY --text FILE

Each method writes the float checkpoint quantized (``jaxserve convert --quantization``); with ``--quantized``,
checkpoints that are quantized already are measured. The text is scored with those weights decoded to float32, which is
the reference, and with the weights as they are stored: activations in float32, in bfloat16, and rounded to 8 bits. The
divergence is the mean over positions of KL(reference || stored), over the whole vocabulary. Each is compared with a
NumPy emulation of the same roundings (``quantized_emulation.py``): the script fails where perplexities or divergences
are further than 5 % from it. ``--speed`` adds the bytes of the weights in memory and tokens per second of one stream.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from jaxtyping import Float

from checkpoints.quantized.on_load import METHODS
from jaxserve import LLM, ConfigError, SamplingParams
from jaxserve.api.config import EngineConfig
from jaxserve.cli import main as jaxserve
from jaxserve.device.build import plan_engine
from jaxserve.text.gguf_tokenizer import load_model_tokenizer
from scripts.quantized_emulation import Llama

_CONTEXT = 256  # tokens that are scored together
_MOST_APART = 0.05
_LEAST = 1e-7  # a divergence that float32 alone explains
_GENERATED = 64  # tokens of a measurement of speed
STORED: dict[str, dict[str, Any]] = {
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
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
        outputs = llm.generate(_prompts(model, text, num_tokens), params, use_tqdm=False)
    following: list[int] = []
    rows: list[np.ndarray] = []
    for output in outputs:
        assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
        following += output.prompt_token_ids[1:]
        for found in output.prompt_logprobs[1:]:
            assert found is not None
            rows.append(np.array([found[token].logprob for token in sorted(found)], np.float64))
    return np.array(following), np.stack(rows)


def _prompts(model: Path, text: str, num_tokens: int) -> list[list[int]]:
    """Return the tokens of the pieces of a text that are scored together."""
    ids = load_model_tokenizer(model).encode(text)[:num_tokens]
    pieces = [list(ids[start : start + _CONTEXT - 1]) for start in range(0, len(ids), _CONTEXT - 1)]
    return [piece for piece in pieces if len(piece) > 1]


def _perplexity(following: np.ndarray, logprobs: Float[np.ndarray, "positions vocab"]) -> float:
    return float(np.exp(-logprobs[np.arange(len(following)), following].mean()))


def _divergence(reference: Float[np.ndarray, "positions vocab"], found: Float[np.ndarray, "positions vocab"]) -> float:
    return max(0.0, float((np.exp(reference) * (reference - found)).sum(axis=1).mean()))  # but for what float32 rounds


class Score(NamedTuple):
    """What a text has of one form of the weights, in the engine and in NumPy.

    Attributes:
        perplexity: In the engine.
        divergence: KL from the reference.
        emulated: The same two of the emulation.
    """

    perplexity: float
    divergence: float
    emulated: tuple[float, float]

    @property
    def is_near(self) -> bool:
        """Whether both are near those of the emulation."""
        found, own = (self.perplexity, self.divergence), self.emulated
        return all(abs(a - b) <= _MOST_APART * b or max(a, b) < _LEAST for a, b in zip(found, own, strict=True))


def scores_of(path: Path, text: str, num_tokens: int, chosen: Mapping[str, dict[str, Any]]) -> dict[str, Score]:
    """Return the score of the reference, "decoded", and of each way to compute with stored weights that can be."""
    common = {"dtype": "float32", "quantization_config": {"weights": "decoded"}}
    following, reference = _scores(path, text, num_tokens, **common)
    ids = _prompts(path, text, num_tokens)
    own = _emulated(Llama(path, "float32", is_decoded=True), ids)
    perplexity = _perplexity(following, reference)
    scores = {"decoded": Score(perplexity, 0.0, (_perplexity(following, own), 0.0))}
    for name, settings in chosen.items():
        try:
            _, found = _scores(path, text, num_tokens, **settings)
        except ConfigError:  # codes that rounded rows are not multiplied with
            continue
        emulated = _emulated(Llama(path, name), ids)
        both = _perplexity(following, emulated), _divergence(own, emulated)
        scores[name] = Score(_perplexity(following, found), _divergence(reference, found), both)
    return scores


def _emulated(model: Llama, prompts: list[list[int]]) -> Float[np.ndarray, "positions vocab"]:
    """Return the same log-probabilities as ``_scores`` does, of the emulation."""
    rows: list[np.ndarray] = []
    for prompt in prompts:
        logits = model.logits(np.array(prompt))[:-1]
        logits = logits - logits.max(axis=1, keepdims=True)
        rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.concatenate(rows)


def _speed(path: Path, settings: dict[str, Any]) -> tuple[float, float]:
    """Return MB of the weights in memory, and tokens per second of one stream: the median of three."""
    given = {"max_model_len": _CONTEXT, "max_num_seqs": 1, **settings}
    num_bytes = plan_engine(EngineConfig.from_arguments(str(path), **given)).needs.weights
    params = SamplingParams(temperature=0, max_tokens=_GENERATED, ignore_eos=True)
    with LLM(str(path), **given) as llm:
        taken: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
            taken.append(time.perf_counter() - start)
    return num_bytes / 1e6, _GENERATED / statistics.median(taken)


def _row(name: str, path: Path, text: str, num_tokens: int, has_speed: bool) -> tuple[str, bool]:
    """Return a line of the table, and whether its numbers are near those of the emulation."""
    scores = scores_of(path, text, num_tokens, STORED)
    cells = [name, f"{scores['decoded'].perplexity:.4f}"]
    for kind, settings in STORED.items():
        score = scores.get(kind)
        if score is None:
            cells += ["-"] * (5 if has_speed else 3)
            continue
        cells += [f"{score.perplexity:.4f}", f"{score.divergence:.1e}", f"{score.emulated[1]:.1e}"]
        if has_speed:
            num_bytes, speed = _speed(path, settings)
            cells += [f"{num_bytes:.1f}", f"{speed:.1f}"]
    return " | ".join(cells), all(score.is_near for score in scores.values())


def main(arguments: list[str] | None = None) -> int:
    """Score the methods and print a table; return 1 if a number is not near that of the emulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a float checkpoint in Hugging Face's format")
    parser.add_argument("--quantized", type=Path, nargs="+", default=[], help="checkpoints that are quantized already")
    parser.add_argument("--text", type=Path, required=True, help="the text that is scored")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text (default: %(default)s)")
    parser.add_argument(
        "--speed", action="store_true", help="measure bytes and speed too, on a machine without other work"
    )
    options = parser.parse_args(arguments)
    text = options.text.read_text()
    if options.model is not None:
        following, floats = _scores(options.model, text, options.tokens, dtype="float32")
        perplexity = _perplexity(following, floats)
        print(f"float32, not quantized: perplexity {perplexity:.4f} over {len(following)} tokens\n")
    kinds = ("perplexity", "KL", "NumPy", *(("MB", "tok/s") if options.speed else ()))
    names = " | ".join(f"{name}: {' | '.join(kinds)}" for name in STORED)
    print(f"| method | decoded: perplexity | {names} |")
    print(f"|{'---|' * (2 + len(kinds) * len(STORED))}", flush=True)
    are_near = True
    for name, path in _checkpoints(options):
        row, is_near = _row(name, path, text, options.tokens, options.speed)
        are_near &= is_near
        print(f"| {row} |{'' if is_near else ' <- further than 5 % from NumPy'}", flush=True)
    return 0 if are_near else 1


def _checkpoints(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the quantized checkpoints to measure, with their names in the table."""
    for method in options.methods if options.model is not None else ():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            given = [str(options.model), str(path), "--format", "safetensors", "--quantization", method]
            jaxserve(["convert", *given])
            yield method, path
    for path in options.quantized:
        yield path.name, path


if __name__ == "__main__":
    sys.exit(main())
