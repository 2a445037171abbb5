"""How many tokens a text has at least, told from its length alone, so that one that is too long is never tokenized."""

from dataclasses import dataclass

from jaxserve.api.request import Request, check_length


@dataclass(frozen=True)
class TextBound:
    """What a tokenizer makes of a text, at most.

    Attributes:
        bytes_per_token: Most bytes of a text, in UTF-8, that one token can stand for.
        counts_space: Whether white space counts; False if a special token may take any amount of it with it.
    """

    bytes_per_token: int
    counts_space: bool = True

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least."""
        counted = text if self.counts_space else "".join(text.split())
        return -(-len(counted.encode("utf-8", "surrogatepass")) // self.bytes_per_token)


def check_text(bound: TextBound | None, request: Request, max_model_len: int) -> None:
    """Reject a request whose text is certainly longer than the context.

    Args:
        bound: Of the model's tokenizer; None if it allows no such statement.
        request: The request. If its prompt may be truncated, any text is accepted.
        max_model_len: Longest context in tokens.

    Raises:
        RequestError: The text is too long.
    """
    text = request.text
    if bound is None or text is None or request.token_ids is not None or len(text) <= max_model_len:
        return
    if request.truncate_prompt_tokens is not None:
        return
    params, num_output_tokens = request.params, 1 if request.pooling is None else 0
    if request.pooling is None and request.is_strict_length:
        num_output_tokens = params.max_tokens or 1
    check_length(bound.least_tokens(text), num_output_tokens, max_model_len)
