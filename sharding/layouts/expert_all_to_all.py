"""Experts and rows over ``expert``; layers of experts send each row to the devices of its experts (arXiv:2006.16668).

With X the ``expert`` axis of r devices, Y the ``tensor`` axis of n devices, T tokens, k of E experts of F features:

    attention    KV pages[P_X, K_Y]      a sequence's rows, pages and state are on one device of X
    router       W[E, D]                 x[T_X, D] -> weights of each token's experts          no collective
    dispatch     all-to-all over X of x[r, c, D] and of experts and weights[r, c, 2k]: the rows that each device needs
    experts      Wgate_up[E_X, 2F_Y, D]  received tokens of local experts                      no collective
                 Wdown[E_X, D, F_Y]      weighted sum over local experts -> {U_Y}              no collective
    return       all-to-all over X of y[r, c, D], sum of the r parts in order, all-reduce over Y -> x[T_X, D]

    A row is sent to a device at most once, so a capacity c of all T / r rows drops nothing. Where tokens have few of
    the experts, c is smaller; an all-reduce (of the largest count) tells all devices whether it suffices, and if not
    they exchange all rows. The rest is as in ``expert_gather``.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "expert_all_to_all",
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
    dispatch="all_to_all",
)
