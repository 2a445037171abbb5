"""What a request may say to a chat template beside its conversation."""

import re
from typing import Any

from jaxserve.errors import RequestError

MAX_VARIABLES = 64
_NAME = re.compile(r"[A-Za-z]\w{0,63}", re.ASCII)
_OWN_NAMES = frozenset(
    "messages conversation conversations tools documents template chat_template tokenize add_generation_prompt"
    " continue_final_message variables return_assistant_tokens_mask return_dict return_tensors template_kwargs"
    " tokenizer_kwargs self raise_exception strftime_now namespace".split()
)


def check_variables(name: str, value: Any) -> dict[str, Any]:
    """The variables of a request for its chat template: names that are not the template's own, and plain values.

    Args:
        name: Of the parameter.
        value: As it came.

    Raises:
        RequestError: No object, too many variables, the name of something that a template is given anyway (such as
            ``messages`` and ``bos_token``), or a value that is no text, number or boolean.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object, got {type(value).__name__}", parameter=name, value=value)
    if len(value) > MAX_VARIABLES:
        raise RequestError(f"{name} must have at most {MAX_VARIABLES} variables, got {len(value)}", parameter=name)
    for key, item in value.items():
        if not _NAME.fullmatch(key) or key in _OWN_NAMES or key.endswith("_token"):
            raise RequestError(f"{name} cannot have the variable {key[:100]!r}", parameter=name)
        if item is not None and not isinstance(item, str | int | float | bool):
            message = f"{name}.{key} must be a string, a number, true or false, got {type(item).__name__}"
            raise RequestError(message, parameter=name)
    return value
