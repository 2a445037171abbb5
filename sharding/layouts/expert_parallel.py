"""Experts over ``tensor``, each whole on one device (GShard, arXiv:2006.16668); the rest as in ``tensor_parallel``.

With Y the ``tensor`` axis of n devices, T tokens, E experts of F features, all tokens on every device:

    router       W[E, D]              x -> weights of each token's experts     no collective
    experts      Wgate_up[E_Y, 2F, D] tokens of local experts                  no collective
                 Wdown[E_Y, D, F]     weighted sum over local experts -> {U_Y}, all-reduce -> x[T, D]

    A shared expert and dense layers split their features, and their parts join the same all-reduce. A step of L layers
    does 2 L + 1 all-reduces and one all-gather.
"""

from sharding.layout import ShardingLayout

LAYOUT = ShardingLayout(
    "expert_parallel",
    {"vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "experts": "tensor"},
)
