"""As ``tensor_parallel``, with hidden states between blocks split by tokens over ``tensor`` (arXiv:2205.05198).

With Y the ``tensor`` axis of n devices, T tokens, N query heads, K key/value heads of H features:

    embedding    E[V_Y, D]            lookup of local rows, reduce-scatter      -> x[T_Y, D]
    attention    norm                 x[T_Y, D], all-gather                     -> x[T, D]
                 Wqkv[(N+2K)H_Y, D]   x -> q, k, v of local heads               no collective
                 KV pages[K_Y]        keys and values of local heads            no collective
                 Wo[D, NH_Y]          local heads -> {U_Y}, reduce-scatter      -> x[T_Y, D]
    MLP          norm                 x[T_Y, D], all-gather                     -> x[T, D]
                 Wgate_up[2F_Y, D]    local features                            no collective
                 Wdown[D, F_Y]        local features -> {U_Y}, reduce-scatter   -> x[T_Y, D]
    experts      as the MLP's, of each expert; one reduce-scatter for their weighted sum and the shared expert
    head         E[V_Y, D]            x[T_Y, D], all-gather; local logits, all-gather -> logits[R, V]

    A step of L layers does 2 L + 1 reduce-scatters and 2 L + 2 all-gathers. Together they move as many bytes as the
    all-reduces of ``tensor_parallel``; norms and residual additions are computed for T / n tokens instead of T. Steps
    with few tokens, where the time of a collective does not depend on its bytes, run as in ``tensor_parallel``.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "sequence_parallel",
    {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor"},
    residual="tokens",
)
