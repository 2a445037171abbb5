"""Measures the proposer of ``suffix`` speculative decoding: its time, and how right it is about prompts asked again.

    python scripts/bench_suffix.py

Prints JSON lines: microseconds per row and step with 10,000 past outputs of 200 tokens (medians), for outputs that have
not been seen and for repeated ones; then the acceptance of 100 prompts that the demo model is asked a second time.
"""

import argparse
import json
import random
import statistics
import time

from jaxserve import LLM, SamplingParams
from jaxserve.api.draft_totals import DraftTotals
from jaxserve.api.request import Request
from jaxserve.api.speculation import SHORTCUTS, check_speculation
from jaxserve.scheduling.proposers.registry import make_proposer
from jaxserve.scheduling.sequence import Sequence

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 200
METHOD = {"method": "suffix", "num_speculative_tokens": 16}


def make_text(rng: random.Random, words: list[list[int]]) -> list[int]:
    """Return a prompt and an output: mostly of common words of several tokens."""
    found = list[int]()
    while len(found) < PROMPT_TOKENS + OUTPUT_TOKENS:
        is_common = rng.random() < 0.8
        found += words[min(int(rng.expovariate(1 / 40)), len(words) - 1)] if is_common else [rng.randrange(32000)]
    return found[: PROMPT_TOKENS + OUTPUT_TOKENS]


def begin(text: list[int], num_output_tokens: int) -> Sequence:
    """Return a sequence that decodes, with the first tokens of its output."""
    tokens = text[: PROMPT_TOKENS + num_output_tokens]
    return Sequence(Request(request_id="s"), tokens, PROMPT_TOKENS, 1 << 20, num_pending=1)


def measure_time(num_past: int) -> None:
    """Print the time per row and step."""
    rng, proposer = random.Random(0), make_proposer(check_speculation(METHOD, dict.fromkeys(SHORTCUTS)))
    assert proposer is not None
    words = [[rng.randrange(32000) for _ in range(rng.randrange(2, 7))] for _ in range(400)]
    past = [make_text(rng, words) for _ in range(num_past)]
    for text in past:
        sequence = begin(text, OUTPUT_TOKENS)
        proposer.propose([sequence])
        proposer.finish(sequence)
    for num_rows in (1, 8, 32):
        found: dict[str, float] = {}
        for kind in ("new", "repeated"):
            texts = [rng.choice(past) if kind == "repeated" else make_text(rng, words) for _ in range(num_rows)]
            rows, times = [begin(text, 8) for text in texts], list[float]()
            for start in range(PROMPT_TOKENS + 8, PROMPT_TOKENS + OUTPUT_TOKENS, 2):
                begun = time.perf_counter()
                proposer.propose(rows)
                times.append(time.perf_counter() - begun)
                for row, text in zip(rows, texts, strict=True):
                    row.token_ids += text[start : start + 2]
            found[f"{kind}_us"] = round(statistics.median(times) * 1e6 / num_rows, 1)
        print(json.dumps({"past_outputs": num_past, "rows": num_rows, **found}))


def measure_acceptance(temperature: float) -> None:
    """Print how many drafts are accepted of prompts that are asked again."""
    rng = random.Random(0)
    prompts = [f"{rng.randrange(100, 1000)}+{rng.randrange(100, 1000)}=" for _ in range(100)]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=128, ignore_eos=True) for seed in range(100)
    ]
    config = {**METHOD, "enable_adaptive_verification": False}
    with LLM("demo", dtype="float32", max_model_len=512, max_num_seqs=8, speculative_config=config) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        before = DraftTotals.of(llm.get_metrics())
        again = llm.generate(prompts, params, use_tqdm=False)
        drafts = DraftTotals.of(llm.get_metrics()).since(before)
    num_same = sum(
        one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(first, again, strict=True)
    )
    rates = {"accepted": round(drafts.acceptance_rate, 3), "tokens_per_step": round(drafts.mean_length, 2)}
    print(json.dumps({"temperature": temperature, **rates, "same": num_same}))


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past-outputs", type=int, default=10_000, help="past outputs (default: %(default)s)")
    options = parser.parse_args()
    measure_time(options.past_outputs)
    for temperature in (0.0, 1.0):
        measure_acceptance(temperature)


if __name__ == "__main__":
    main()
