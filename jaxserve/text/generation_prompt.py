"""Find the end of a rendered prompt that begins the next message, and the tokens that it takes.

The next turn of a conversation may write this part otherwise, as templates do that leave out the thoughts of earlier
messages: what is kept of a prompt for the next turn is best kept before it.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.text.chat import Message, render_chat


def find_generation_prompt(
    prompt: str, conversation: Sequence[Message], template: str, *, add_generation_prompt: bool = True, **options: Any
) -> str | None:
    """Return the end of a rendered prompt that the template writes for ``add_generation_prompt`` alone.

    Args:
        prompt: What ``render_chat`` returned for the same arguments.
        conversation: As in ``render_chat``.
        template: As in ``render_chat``.
        add_generation_prompt: As in ``render_chat``.
        **options: The other arguments of ``render_chat``.

    Returns:
        The end; None if the template cannot do without.
    """
    if not add_generation_prompt:
        return ""
    try:
        history = render_chat(conversation, template, add_generation_prompt=False, **options)
    except RequestError:
        return None
    return prompt[len(history if prompt.startswith(history) else os.path.commonprefix((prompt, history))) :]


def count_generation_tokens(
    encode: Callable[[str, bool], list[int]], text: str, token_ids: list[int], generation_prompt: str
) -> int:
    """Return how many of a prompt's last tokens are not the same without its generation prompt.

    Args:
        encode: Of the tokenizer; its second argument is whether to add special tokens, as nothing is to the prompt.
        text: The rendered prompt.
        token_ids: Its tokens.
        generation_prompt: The end of the text.
    """
    if not generation_prompt:
        return 0
    own = encode(generation_prompt, False)
    if token_ids[-len(own) :] == own:
        return len(own)
    history = encode(text.removesuffix(generation_prompt), False)
    return len(token_ids) - len(os.path.commonprefix((token_ids, history)))
