"""Column- and row-parallel linears over ``tensor`` (Megatron-LM, arXiv:1909.08053), heads and vocabulary split.

With Y the ``tensor`` axis of n devices, T tokens, N query heads, K key/value heads of H features:

    embedding    E[V_Y, D]            lookup of own rows, all-reduce           -> x[T, D]
    attention    Wqkv[(N+2K)H_Y, D]   x -> q, k, v of own heads                no collective
                 KV pages[K_Y]        own heads' keys and values              no collective
                 Wo[D, NH_Y]          own heads -> {U_Y}, all-reduce           -> x[T, D]
    MLP          Wgate_up[2F_Y, D]    own features                             no collective
                 Wdown[D, F_Y]        own features -> {U_Y}, all-reduce        -> x[T, D]
    head         E[V_Y, D]            own logits, all-gather                   -> logits[R, V]

So a step of L layers does 2 L + 1 all-reduces and one all-gather; a model that norms queries and keys over all heads
at once (OLMo-2) does one small all-reduce more a layer. When there are fewer key/value heads than devices they are
replicated: device d holds head d K / n.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "tensor_parallel",
    {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor"},
    all_reduces_per_layer=2,
    all_reduces_per_step=1,
    all_gathers_per_step=1,
)
