"""One conversation as a prompt: what every way to chat with a model goes through."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.request import PromptInput, params_for_each
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.chat import choose_template, load_chat_template, render_chat, split_conversations
from jaxserve.text.tokenizer import Tokenizer


def read_template(template: str | None) -> str | None:
    """The source of a template given as itself or as a file; None stays None.

    Raises:
        RequestError: A file that cannot be read.
    """
    return None if template is None else load_chat_template(template)


def chat_prompts(tokenizer: Tokenizer, messages: Any, params: Any, **options: Any) -> list[PromptInput]:
    """The prompts of one conversation or of a list of them.

    Args:
        tokenizer: The model's.
        messages: A list of messages, or a list of such lists.
        params: How to sample the answers: for all, or one for each.
        **options: As ``chat_prompt``.

    Raises:
        RequestError: A message or an option that is wrong, no template, or a conversation that it refuses.
    """
    conversations = split_conversations(messages)
    pairs = zip(conversations, params_for_each(params, len(conversations)), strict=True)
    return [chat_prompt(tokenizer, *pair, **options) for pair in pairs]


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    params: SamplingParams | None,
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptInput:
    """The text of a conversation and its token ids; the template writes special tokens, so none are added.

    Args:
        tokenizer: The model's.
        conversation: Messages with ``role`` and ``content``, as ``split_conversations`` gives them.
        params: How to sample the answer.
        chat_template: Jinja source in place of the model's template.
        chat_template_content_format: What the template sees of contents: ``string``, ``openai`` or ``auto``.
        add_generation_prompt: End the prompt where the assistant's message begins.
        continue_final_message: Leave the last message open, to be continued.
        tools: Passed to the template.
        chat_template_kwargs: Further variables for the template.

    Raises:
        RequestError: No template, a conversation that it refuses, or a format that there is not.
    """
    text = render_chat(
        conversation,
        choose_template(tokenizer.chat_templates, chat_template, tools is not None),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        content_format=chat_template_content_format,
        variables={**tokenizer.special_tokens, **(chat_template_kwargs or {})},
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return PromptInput(prompt=text, prompt_token_ids=tuple(token_ids), params=params, is_chat=True)
