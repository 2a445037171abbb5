"""Experts over ``expert``, their features over ``tensor``, and every row on every device of ``expert``.

With X the ``expert`` axis of r devices, Y the ``tensor`` axis of n devices, T tokens, E experts of F features:

    router       W[E, D]                 x -> weights of each token's experts     no collective
    experts      Wgate_up[E_X, 2F_Y, D]  tokens of local experts                  no collective
                 Wdown[E_X, D, F_Y]      weighted sum over local experts -> {U_XY}, all-reduce over both -> x[T, D]

    Attention, dense layers and the head are as in ``tensor_parallel``, and equal on all devices of ``expert``, as are
    the pages of keys and values. A shared expert splits its features over ``tensor`` and is added by the first device
    of ``expert``. It has the fewest collectives, one per layer of experts, and splits the least.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "expert_all_reduce",
    {
        "vocab": "tensor",
        "q_heads": "tensor",
        "kv_heads": "tensor",
        "ffn": "tensor",
        "expert_ffn": "tensor",
        "experts": "expert",
    },
)
