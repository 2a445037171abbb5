"""Attention whole on every device; MLPs, experts and the vocabulary split over ``tensor`` as in ``tensor_parallel``.

With Y the ``tensor`` axis of n devices, T tokens, N query heads, K key/value heads of H features:

    embedding    E[V_Y, D]            lookup of local rows, all-reduce         -> x[T, D]
    attention    Wqkv[(N+2K)H, D]     x -> q, k, v of all heads                no collective
                 KV pages[K]          keys and values of all heads             no collective
                 Wo[D, NH]            all heads                                -> x[T, D], no collective
    MLP          Wgate_up[2F_Y, D]    local features                           no collective
                 Wdown[D, F_Y]        local features -> {U_Y}, all-reduce      -> x[T, D]
    experts      as the MLP's, of each expert; one all-reduce for their weighted sum and the shared expert
    head         E[V_Y, D]            local logits, all-gather                 -> logits[R, V]

    A step of L layers does L + 1 all-reduces and one all-gather. The number of heads need not be a multiple of n, but
    every device computes all of attention, and stores its weights and all pages.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "replicated_attention",
    {"vocab": "tensor", "ffn": "tensor", "expert_ffn": "tensor"},
)
