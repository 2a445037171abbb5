"""Column- and row-parallel linears over ``tensor`` (Megatron-LM, arXiv:1909.08053), heads and vocabulary split.

With Y the ``tensor`` axis of n devices, T tokens, N query heads, K key/value heads of H features:

    embedding    E[V_Y, D]            lookup of local rows, all-reduce         -> x[T, D]
    attention    Wqkv[(N+2K)H_Y, D]   x -> q, k, v of local heads              no collective
                 KV pages[K_Y]        keys and values of local heads           no collective
                 Wo[D, NH_Y]          local heads -> {U_Y}, all-reduce         -> x[T, D]
    MLP          Wgate_up[2F_Y, D]    local features                           no collective
                 Wdown[D, F_Y]        local features -> {U_Y}, all-reduce      -> x[T, D]
    experts      as the MLP's, of each expert; one all-reduce for their weighted sum and the shared expert
    head         E[V_Y, D]            local logits, all-gather                 -> logits[R, V]

    A step of L layers does 2 L + 1 all-reduces and one all-gather; a model that normalizes queries and keys over all
    heads at once (OLMo-2) does one more small all-reduce per layer. With fewer key/value heads than devices, heads are
    replicated: device d has head d K / n.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "tensor_parallel",
    {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor"},
)
