"""Tokens of KV pages over ``tensor`` (decode context parallelism, as in arXiv:2507.07120); the rest as in
``tensor_parallel``.

With Y the ``tensor`` axis of n devices, T tokens, N query heads, K key/value heads of H features, pages of p tokens:

    attention    Wq[NH_Y, D], Wkv[2KH, D]   x -> q of local heads, k and v of all      no collective
                 KV pages[K, p_Y]           position s is on device s mod n            no collective
                 q[T, N_Y, H]               all-gather                                 -> q[T, N, H]
                 softmax over local tokens  weighted sum, sum of weights, largest score of each head[T, N, H + 2]
                                            all-to-all: all parts of the local heads   -> [n, T, N_Y, H + 2]
                 Wo[D, NH_Y]                local heads -> {U_Y}, all-reduce           -> x[T, D]

    A layer has one all-gather and one all-to-all more than in ``tensor_parallel``. Every device projects the keys and
    values of all heads and stores every n-th token of each context, so pages of T tokens take 2 K H T / n numbers per
    layer: less than in ``tensor_parallel`` where K < n, and for latents (MLA), which have one head. ``block_size``
    counts the tokens of a page on all devices; it must be a multiple of n.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "context_parallel",
    {"vocab": "tensor", "q_heads": "tensor", "tokens": "tensor", "ffn": "tensor", "expert_ffn": "tensor"},
)
