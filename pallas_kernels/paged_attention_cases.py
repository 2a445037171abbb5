"""Shapes that paged attention is checked on, and shapes of real models that it is measured on."""

from typing import Any, NamedTuple

from pallas_kernels.operation import BFLOAT16_HEADS, add_twins


class Case(NamedTuple):
    """One step of paged attention.

    Attributes:
        rows: (Context, query) lengths in tokens, decode rows first.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Width of a head.
        page_size: Tokens per page.
        window: Sliding window in tokens, or None.
        soft_cap: Bound of the scores, or None.
        dtype: Element type of queries, keys and values.
        spare_rows: Empty rows after those in use.
        spare_tokens: Padding tokens after the rows' tokens, in a step that is not of decode rows alone.
        row_tile: As ``PagedAttention.attend`` takes it.
        table_pages: Width of the page table; None for two pages more than the longest context has.
        has_sinks: Whether each query head has a sink.
        value_dim: Width of a value that is the beginning of its key, in ``latent_attention``; None for values of their
            own, as wide as a head.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: str = "float32"
    spare_rows: int = 2
    spare_tokens: int = 3
    row_tile: int | None = None
    table_pages: int | None = None
    has_sinks: bool = False
    value_dim: int | None = None

    @property
    def value_width(self) -> int:
        """Return the width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_single(self) -> int:
        """Number of leading rows of one token."""
        return next((i for i, (_, query) in enumerate(self.rows) if query != 1), len(self.rows))

    @property
    def is_decode_only(self) -> bool:
        """Return whether the step has decode rows alone."""
        return self.num_single == len(self.rows)

    @property
    def num_rows(self) -> int:
        """Return all rows, empty ones too."""
        return len(self.rows) + self.spare_rows

    @property
    def num_tokens(self) -> int:
        """Return all query tokens, padding too."""
        if self.is_decode_only:
            return self.num_rows
        return max(sum(query for _, query in self.rows) + self.spare_tokens, self.num_rows)

    def row_pages(self) -> list[int]:
        """Number of pages of each row."""
        return [-(-context // self.page_size) for context, _ in self.rows] + [0] * self.spare_rows


_MIXED = ((33, 1), (5, 1), (64, 64), (150, 20), (7, 7))
_EDGES = ((1, 1), (15, 1), (16, 1), (17, 1), (63, 1), (64, 1), (65, 1), (101, 1))

CASES: dict[str, Case] = {
    "one_token": Case(rows=((1, 1),)),
    "edges": Case(rows=_EDGES),
    "edges_of_page_64": Case(rows=_EDGES, page_size=64, head_dim=64),
    "longer_decode": Case(rows=((2050, 1), (1, 1), (513, 1)), page_size=32, head_dim=16),
    "prefill": Case(rows=((37, 37),)),
    "chunk_inside_a_page": Case(rows=((41, 5), (75, 70), (300, 3), (2, 2), (66, 2)), page_size=64),
    "mixed": Case(rows=_MIXED),
    "mixed_full": Case(rows=((64, 1), (32, 32), (48, 16)), spare_rows=0, spare_tokens=0),
    "many_rows": Case(rows=tuple((7 * i + 1, 1) for i in range(20))),
    "multi_head": Case(rows=((33, 1), (20, 20)), num_heads=4, num_kv_heads=4),
    "multi_query": Case(rows=((33, 1), (20, 20)), num_heads=7, num_kv_heads=1),
    "group_of_eight": Case(rows=((33, 1), (20, 20)), num_heads=16, num_kv_heads=2),
    "group_of_twenty": Case(rows=((70, 1), (20, 20)), num_heads=20, num_kv_heads=1),
    "small_page": Case(rows=((33, 1), (64, 50)), page_size=8),
    "page_of_32": Case(rows=((95, 1), (97, 1), (100, 40)), page_size=32),
    "large_page": Case(rows=((300, 1), (200, 130)), page_size=128),
    "head_of_80": Case(rows=((33, 1), (70, 40)), head_dim=80),
    "head_of_96": Case(rows=((130, 1), (20, 20)), head_dim=96, page_size=64),
    "head_of_128": Case(rows=((130, 1), (100, 60)), num_heads=8, head_dim=128, page_size=64),
    "window": Case(rows=((100, 1), (5, 1), (120, 60)), window=24),
    "window_one": Case(rows=((100, 1), (30, 30)), window=1),
    "window_of_tiles": Case(rows=((700, 1), (300, 1), (400, 90)), window=128, page_size=64),
    "soft_cap": Case(rows=((50, 1), (40, 40)), soft_cap=5.0),
    "soft_cap_and_window": Case(rows=((150, 1), (90, 40)), soft_cap=2.0, window=70),
    "bfloat16_decode": Case(
        rows=((700, 1), (65, 1), (1, 1)), num_heads=8, head_dim=128, page_size=64, dtype="bfloat16"
    ),
    "bfloat16_mixed": Case(rows=_MIXED, num_heads=8, head_dim=64, dtype="bfloat16"),
    "one_by_one": Case(rows=_MIXED, row_tile=8),
    "one_by_one_window": Case(rows=((100, 1), (120, 60)), window=24, row_tile=8),
    "sinks": Case(rows=_MIXED, has_sinks=True),
    "sinks_decode": Case(rows=((2050, 1), (1, 1), (513, 1)), num_heads=6, page_size=32, has_sinks=True),
    "sinks_window": Case(
        rows=((150, 1), (90, 40)), num_heads=16, head_dim=64, window=70, dtype="bfloat16", has_sinks=True
    ),
    "sinks_one_by_one": Case(rows=_MIXED, row_tile=8, has_sinks=True),
}


DEVICE_CASES: dict[str, Case] = add_twins(CASES, BFLOAT16_HEADS)

# What an engine with Llama-3.1-8B's shape gives its kernels: max_num_seqs rows in a step that is not of decode rows
# alone, at least two rows in one that is, and a page table as wide as max_model_len needs.
ENGINE_ROWS = 256
ENGINE_LEAST_ROWS = 2
ENGINE_MODEL_LENS = (8448, 131072)


def _bench(*rows: tuple[int, int], page_size: int, **sizes: Any) -> Case:
    """Return the attention of a layer of Llama-3.1-8B, or one of other sizes, as the engine calls it."""
    longest = max(context for context, _ in rows)
    model_len = next(length for length in ENGINE_MODEL_LENS if longest <= length)
    is_decode = all(query == 1 for _, query in rows)
    return Case(
        rows=rows,
        **{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **sizes},
        page_size=page_size,
        dtype="bfloat16",
        spare_rows=max(ENGINE_LEAST_ROWS, len(rows)) - len(rows) if is_decode else ENGINE_ROWS - len(rows),
        spare_tokens=0,
        table_pages=-(-model_len // page_size),
    )


_CONTEXTS = {"1k": 1 << 10, "8k": 1 << 13, "32k": 1 << 15}
_CHUNKS = {"256": 1 << 8, "2k": 1 << 11, "8k": 1 << 13}
_PREFIXES = {"0": 0, "8k": 1 << 13, "32k": 1 << 15}
_GPT_OSS = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "has_sinks": True}
_MOST_TOKENS = 1 << 22  # of context: 16 GB of keys and values, and as much for the copy that they are made from

BENCHES: dict[str, Case] = (
    {
        f"decode_{num_rows}x{name}_page_{page_size}": _bench(*[(context, 1)] * num_rows, page_size=page_size)
        for page_size in (64, 16)
        for name, context in _CONTEXTS.items()
        for num_rows in (1, 8, 64, 256)
        if num_rows * context <= _MOST_TOKENS
    }
    | {
        f"prefill_{name}_after_{before}_page_{page_size}": _bench((prefix + chunk, chunk), page_size=page_size)
        for page_size in (64, 16)
        for name, chunk in _CHUNKS.items()
        for before, prefix in _PREFIXES.items()
    }
    | {
        "sinks_decode_64x8k_page_64": _bench(*[(1 << 13, 1)] * 64, page_size=64, **_GPT_OSS),
        "sinks_decode_8x8k_page_64": _bench(*[(1 << 13, 1)] * 8, page_size=64, **_GPT_OSS),
        "sinks_prefill_2k_after_8k_page_64": _bench((5 << 11, 1 << 11), page_size=64, **_GPT_OSS),
    }
)
