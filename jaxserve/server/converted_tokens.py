"""The limit of tokens that one request converts to text."""

from jaxserve.api.errors import RequestError

MAX_CONVERTED_TOKENS = 1 << 18
"""Most tokens converted to text in one request: more would keep others waiting."""


def check_converted(name: str, num_tokens: int) -> None:
    """Reject a request to convert more than ``MAX_CONVERTED_TOKENS`` tokens to text.

    Args:
        name: The parameter that asks for the text.
        num_tokens: Number of tokens.

    Raises:
        RequestError: There are too many.
    """
    if num_tokens > MAX_CONVERTED_TOKENS:
        message = f"{name}: expected at most {MAX_CONVERTED_TOKENS} tokens at once, got {num_tokens}"
        raise RequestError(message, parameter=name, value=num_tokens)
