"""One conversation as a prompt: what every way to chat with a model goes through."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.engine.chat import load_chat_template
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.request import PromptInput
from jaxserve.sampling_params import SamplingParams


def read_template(template: str | None) -> str | None:
    """The source of a template given as itself or as a file; None stays None.

    Raises:
        RequestError: A file that cannot be read.
    """
    return None if template is None else load_chat_template(template)


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    params: SamplingParams | None,
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptInput:
    """The text of a conversation and its token ids; the template writes special tokens, so none are added.

    Args:
        tokenizer: The model's.
        conversation: Messages with ``role`` and ``content``.
        params: How to sample the answer.
        chat_template: Jinja source in place of the model's template.
        add_generation_prompt: End the prompt where the assistant's message begins.
        continue_final_message: Leave the last message open, to be continued.
        tools: Passed to the template.
        chat_template_kwargs: Further variables for the template.

    Raises:
        RequestError: No template, or a conversation that it refuses.
    """
    text = tokenizer.render_chat(
        conversation,
        chat_template,
        add_generation_prompt,
        continue_final_message,
        tools,
        **(chat_template_kwargs or {}),
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return PromptInput(prompt=text, prompt_token_ids=tuple(token_ids), params=params, is_chat=True)
