"""Accuracy of the demo model: an end-to-end check of everything between a prompt and its completion."""

import json
from typing import Any

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.demo.tasks import TASKS, chat_messages, completion_prompt, held_out, is_correct
from jaxserve.llm import LLM


def demo_accuracy(llm: LLM, num_items: int) -> dict[str, dict[str, float]]:
    """Return the accuracy on ``num_items`` held-out questions per task, asked in chat and completion form."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    found: dict[str, dict[str, float]] = {}
    for task in TASKS:
        items = held_out(task, num_items)
        chats = llm.chat([chat_messages(item) for item in items], params, use_tqdm=False)
        completions = llm.generate([completion_prompt(item) for item in items], params, use_tqdm=False)
        found[task] = {
            form: sum(is_correct(item, out.outputs[0].text) for item, out in zip(items, outputs, strict=True))
            / len(items)
            for form, outputs in (("chat", chats), ("completion", completions))
        }
    return found


def evaluate_demo(arguments: dict[str, Any], num_items: int, as_json: bool) -> None:
    """Print the accuracy of each task in both forms."""
    with LLM(**arguments) as llm:
        found = demo_accuracy(llm, num_items)
    if as_json:
        print(json.dumps(found))
        return
    print(f"{'task':<10}{'chat':>12}{'completion':>12}   ({num_items} held-out questions each)")
    for task, forms in found.items():
        print(f"{task:<10}{forms['chat']:>12.1%}{forms['completion']:>12.1%}")
