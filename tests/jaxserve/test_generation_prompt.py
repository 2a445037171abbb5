"""The end of a rendered prompt that begins the answer: found in text and in tokens, of tiny and of real templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.request import Request
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.engine.admission import Admission
from jaxserve.engine.model_limits import ModelLimits
from jaxserve.text.chat import render_chat
from jaxserve.text.chat_prompt import chat_prompt
from jaxserve.text.generation_prompt import count_generation_tokens, find_generation_prompt
from jaxserve.text.render_pool import RenderPool
from jaxserve.text.tokenizer import Tokenizer
from tests.jaxserve.test_chat import CONVERSATION, SPECIAL

QUESTION = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def found(template: str, conversation: list[dict[str, Any]], **options: Any) -> tuple[str, str | None]:
    """A rendered prompt, and its end that begins the answer."""
    options = {"variables": SPECIAL, **options}
    text = render_chat(conversation, template, **options)
    return text, find_generation_prompt(text, conversation, template, **options)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("{% if add_generation_prompt %}<assistant>{% endif %}", "<assistant>"),
        ("{{ '<bot>' if add_generation_prompt else '<end>' }}", "bot>"),
        ("<always>", ""),
        ("{{ '<bot>' if add_generation_prompt else raise_exception('never') }}", None),
    ],
)
def test_the_end_is_what_a_template_writes_for_the_answer_alone(ending: str, expected: str | None) -> None:
    assert found(PLAIN + ending, QUESTION)[1] == expected
    is_open = ending == "<always>" or "else" in ending
    if not is_open:
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        assert found(PLAIN + ending, QUESTION, **options)[1] == ""


@pytest.mark.parametrize(("is_thinking", "expected"), [(True, ""), (False, "<think>\n\n</think>\n\n")])
def test_the_next_turn_repeats_a_prompt_up_to_its_end(is_thinking: bool, expected: str, shared_data: Path) -> None:
    """Qwen 3's template drops the thoughts of earlier turns."""
    template = json.loads((shared_data / "tokenizers/qwen/qwen3_tokenizer_config.json").read_text())["chat_template"]
    variables = {"enable_thinking": is_thinking}
    text, end = found(template, QUESTION, variables=variables)
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    assert end is not None and end == f"<|im_start|>assistant\n{expected}"
    assert found(template, [*QUESTION, answer, *QUESTION], variables=variables)[0].startswith(text.removesuffix(end))


def test_sequences_know_the_tokens_that_begin_their_answers(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-fallback"]
    conversation = [{"role": "user", "content": "hello"}]
    limits, renderer = ModelLimits(max_model_len=99, vocab_size=400, eos_token_ids=()), RenderPool()
    for is_found, expected in ((True, 1), (False, -1)):
        request = chat_prompt(tokenizer, renderer, conversation, SamplingParams(), finds_generation_prompt=is_found)
        assert request.generation_prompt == ("<|assistant|>" if is_found else None)
        state = Admission(limits, tokenizer, None).admit(request, default_seed=0, arrival_s=0.0)
        assert state.samples[0].sequence.num_generation_tokens == expected
    renderer.close()


def test_tokens_across_the_end_begin_the_answer_too(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tiny_tokenizers["byte-level"]
    text = "oh hello"
    token_ids = tokenizer.encode(text, False)
    assert [tokenizer.decode([token]) for token in token_ids] == ["o", "h", " ", "hell", "o"]
    counts = {
        ending: count_generation_tokens(tokenizer.encode, text, token_ids, ending)
        for ending in ("", "o", "lo", "llo", "hello", " hello")
    }
    assert counts == {"": 0, "o": 1, "lo": 2, "llo": 2, "hello": 2, " hello": 3}


def test_prompts_without_a_known_end_say_so(tiny_tokenizers: dict[str, Tokenizer]) -> None:
    limits = ModelLimits(max_model_len=99, vocab_size=400, eos_token_ids=())
    admission = Admission(limits, tiny_tokenizers["byte-fallback"], None)
    for request in (Request(text="abc"), Request(token_ids=(1, 2))):
        state = admission.admit(request, default_seed=0, arrival_s=0.0)
        assert state.samples[0].sequence.num_generation_tokens == -1


def test_conversations_with_tools_have_an_end(shared_data: Path) -> None:
    folder = shared_data / "configs/chat-templates"
    ends = {}
    for path in sorted(folder.glob("*.jinja")):
        try:
            text, end = found(path.read_text(), CONVERSATION[:1])
        except Exception:
            continue
        assert end is None or text.endswith(end)
        ends[path.name] = end
    assert len(ends) > 5 and sum(bool(end) for end in ends.values()) > len(ends) // 2, ends
