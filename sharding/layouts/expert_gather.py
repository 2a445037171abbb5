"""Experts and rows over ``expert``; layers of experts gather the rows of all devices and scatter their results.

With X the ``expert`` axis of r devices, Y the ``tensor`` axis of n devices, T tokens, k of E experts of F features:

    attention    KV pages[P_X, K_Y]      a sequence's rows, pages and state are on one device of X
    router       W[E, D]                 x[T_X, D] -> weights of each token's experts          no collective
    dispatch     all-gather over X of x[T_X, D] and of experts and weights[T_X, 2k]            -> x[T, D]
    experts      Wgate_up[E_X, 2F_Y, D]  tokens of local experts                               no collective
                 Wdown[E_X, D, F_Y]      weighted sum over local experts -> {U_XY}, reduce-scatter over X,
                                         all-reduce over Y of T / r rows                       -> x[T_X, D]

    Attention, dense layers and the head are as in ``tensor_parallel``, each device of ``expert`` with its own rows:
    they have no collective over ``expert``. A shared expert computes a device's own rows. No token is dropped.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "expert_gather",
    {
        "vocab": "tensor",
        "q_heads": "tensor",
        "kv_heads": "tensor",
        "ffn": "tensor",
        "expert_ffn": "tensor",
        "experts": "expert",
        "batch": "expert",
        "pages": "expert",
    },
    dispatch="gather",
)
