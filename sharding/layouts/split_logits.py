"""As ``tensor_parallel``, but each device keeps the logits of its part of the vocabulary, and all sample together.

With Y the ``tensor`` axis of n devices, R rows to sample, V tokens:

    head         E[V_Y, D]            local logits                             -> logits[R, V_Y], no collective
    slots        counts, bias[V_Y]    masks, bias and penalties of local logits                  no collective
    argmax       logits[R, V_Y]       in every step: local argmax -> n per row, all-gather       -> token[R]
    random       logits[R, V_Y]       largest logit, all-reduce; sums of blocks of 256 tokens, all-gather;
                                      weights of the winning block, all-reduce                   -> token[R]
    top-k, top-p logits[R, V_Y]       local 1,024 largest, all-gather; for each of the two, masses above a
                                      threshold, all-gather of n numbers per row: one, and 32 more if over
                                      1,024 tokens are kept                                      -> floor[R]
    logprobs     logits[R, V_Y]       local largest, ranks and sums, 3 all-gathers; named tokens and the largest
                                      logit, 2 all-reduces                                       -> logprobs

    The layers are as in ``tensor_parallel``: a step of L layers does 2 L + 1 all-reduces, and those of sampling. Only
    logits processors need whole rows: with them, steps that use the full sampler all-gather logits[R, V]. The
    vocabulary is padded to n times a multiple of 256, with tokens that are never sampled.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "split_logits",
    {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor"},
    logits="split",
)
