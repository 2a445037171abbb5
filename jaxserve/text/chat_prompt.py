"""Convert conversations to prompts, for all chat APIs."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.api.request import Request, params_for_each, priorities_for_each
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.text.chat import choose_template, load_chat_template, render_chat, split_conversations
from jaxserve.text.generation_prompt import find_generation_prompt
from jaxserve.text.tokenizer import Tokenizer


def read_template(template: str | None) -> str | None:
    """Return the source of a template given as source or as a path; None for None.

    Raises:
        RequestError: The file cannot be read.
    """
    return None if template is None else load_chat_template(template)


def chat_prompts(
    tokenizer: Tokenizer, messages: Any, params: Any, default: SamplingParams, priority: Any, **options: Any
) -> list[Request]:
    """Return the requests of one conversation or of a list of them.

    Args:
        tokenizer: Tokenizer of the model.
        messages: A list of messages, or a list of such lists.
        params: Sampling parameters, for all conversations or one per conversation.
        default: Parameters of conversations without any.
        priority: One number per conversation, or None.
        **options: As in ``chat_prompt``.

    Raises:
        RequestError: A message or an option is invalid, there is no template, or it fails.
    """
    conversations = split_conversations(messages)
    number = len(conversations)
    each = zip(
        conversations, params_for_each(params, number, default), priorities_for_each(priority, number), strict=True
    )
    return [chat_prompt(tokenizer, *one, **options) for one in each]


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    priority: int = 0,
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    finds_generation_prompt: bool = False,
) -> Request:
    """Render and tokenize a conversation. The template writes the special tokens, so none are added.

    Args:
        tokenizer: Tokenizer of the model.
        conversation: Messages with ``role`` and ``content``, from ``split_conversations``.
        params: Sampling parameters.
        priority: The lowest run first.
        chat_template: Jinja source that replaces the model's template.
        chat_template_content_format: Form of contents in the template: ``string``, ``openai`` or ``auto``.
        add_generation_prompt: Whether to end with the start of an assistant message.
        continue_final_message: Whether to leave the last message open, for the model to continue.
        tools: Tools for the template.
        chat_template_kwargs: Further template variables.
        finds_generation_prompt: Whether to find which end of the prompt begins the answer, for which it is rendered
            once more.

    Raises:
        RequestError: There is no template, it fails, or the content format is unknown.
    """
    template = choose_template(tokenizer.chat_templates, chat_template, tools is not None)
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": tools,
        "content_format": chat_template_content_format,
        "variables": {**tokenizer.special_tokens, **(chat_template_kwargs or {})},
    }
    text = render_chat(conversation, template, **options)
    end = find_generation_prompt(text, conversation, template, **options) if finds_generation_prompt else None
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    chat = {"messages": conversation, "continue_final_message": continue_final_message}
    ids = tuple(token_ids)
    return Request(text=text, token_ids=ids, chat=chat, params=params, priority=priority, generation_prompt=end)
