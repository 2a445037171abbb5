"""BOS and EOS that tokenizer_config.json asks for (`add_bos_token`, `add_eos_token`) and tokenizer.json does not add.

transformers 4 added them, and models with such files (DeepSeek) were trained with them. transformers 5 ignores both
flags beside a tokenizer.json.
"""

import logging
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import processors

logger = logging.getLogger(__name__)

_SAMPLE = "a"


def add_flagged_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Make a tokenizer add the BOS and EOS that the flags ask for, one of each; templates of chats write their own.

    Args:
        tokenizer: Changed in place, its truncation and padding disabled.
        config: Contents of tokenizer_config.json.
        special_tokens: Texts of the special tokens by name.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain = tokenizer.encode(_SAMPLE, add_special_tokens=False).ids
    full = tokenizer.encode(_SAMPLE, add_special_tokens=True).ids
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    own = full[:start], full[start + len(plain) :]
    bos = _flagged(tokenizer, config, special_tokens, "bos", own[0][:1])
    eos = _flagged(tokenizer, config, special_tokens, "eos", own[1][-1:])
    if bos or eos:
        template = _template(tokenizer, bos + own[0], own[1] + eos)
        kept = tokenizer.post_processor
        # A second template would take the tokens that the first one adds for another text.
        adds_none = kept is not None and not (own[0] or own[1])
        tokenizer.post_processor = processors.Sequence([kept, template]) if adds_none else template


def _flagged(
    tokenizer: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    name: str,
    present: list[int],
) -> list[int]:
    """Return the id of BOS or EOS if its flag is set and the tokenizer does not add it; none otherwise."""
    if config.get(f"add_{name}_token") is not True:
        return []
    token = special_tokens.get(f"{name}_token")
    token_id = None if token is None else tokenizer.token_to_id(token)
    if token_id is None:
        logger.warning(
            "tokenizer_config.json has add_%s_token: true but no %s_token in the vocabulary: none is added", name, name
        )
        return []
    return [] if present == [token_id] else [token_id]


def _template(tokenizer: tokenizers.Tokenizer, before: list[int], after: list[int]) -> processors.TemplateProcessing:
    """Return a post-processor that puts tokens before and after each text."""
    names = {token_id: f"token{token_id}" for token_id in [*before, *after]}
    tokens = {token_id: tokenizer.id_to_token(token_id) or "" for token_id in names}
    first, last = [names[token_id] for token_id in before], [names[token_id] for token_id in after]
    special = [{"id": name, "ids": [token_id], "tokens": [tokens[token_id]]} for token_id, name in names.items()]
    return processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=special
    )
