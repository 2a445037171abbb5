"""The fixed set of batch shapes to compile. A step runs in the smallest shape that holds it."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from jaxserve.api.errors import ConfigError
from jaxserve.device.step_batch import BatchShape

_SMALLEST_MIXED = 64
_FEW_ROWS = 64
_FEWEST_ROWS, _FEWEST_TOKENS = 8, 128  # smallest shapes for kernels that skip padding


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes of the batch shapes to compile.

    Attributes:
        decode_rows: Rows of each decode shape without drafts, ascending.
        mixed_tokens: Query tokens of each mixed shape, ascending.
        max_num_seqs: Most rows per step.
        table_pages: M, pages of the longest context.
        multiple: Rows and tokens of every shape are a multiple of this; tokens of mixed shapes may be one of more.
        max_samples: Most samples per row: one plus the number of drafts.
        max_step_samples: Most samples of all rows; None for as many as rows and tokens allow.
        draft_rows: Rows of each decode shape with drafts, ascending; none if empty: these steps run in mixed shapes.
        num_tables: Number of page tables per row.
        num_arguments: Logits processor arguments per row.
        state_distance: As in ``BatchShape``.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    max_num_seqs: int
    table_pages: int
    multiple: int = 1
    max_samples: int = 1
    max_step_samples: int | None = None
    draft_rows: tuple[int, ...] = ()
    num_tables: int = 1
    num_arguments: int = 0
    state_distance: int = 0

    @classmethod
    def make(
        cls,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        table_pages: int,
        multiple: int = 1,
        compile_sizes: Mapping[str, Sequence[int]] | None = None,
        skips_padding: bool = False,
        max_samples: int = 1,
        max_step_samples: int | None = None,
        num_tables: int = 1,
        token_multiple: int = 1,
    ) -> "Buckets":
        """Create buckets from ``compile_sizes``, with default sizes for a kind of step that it leaves out.

        Default sizes are powers of two. Mixed shapes from 64 tokens on also have the sizes halfway between, so that at
        most a third of a step is padding. Decode shapes have them from 16 rows on if ``max_num_seqs`` is at most 64;
        this keeps the number of programs below 40. If kernels skip padding (``skips_padding``), the sizes are the
        largest one, an eighth of it, and so on. All sizes are rounded up to multiples of ``multiple``, those of mixed
        shapes also to multiples of ``token_multiple``, the number of devices that share the tokens of a step. With
        drafts, no default sizes are halfway, and decode shapes with drafts have the most rows, an eighth, and so on; if
        kernels skip padding, there is one mixed shape, as startup takes long enough with the shapes for drafts.

        Raises:
            ConfigError: A size in ``compile_sizes`` is larger than any step, or no mixed size holds the largest step.
        """
        given = compile_sizes or {}
        multiples = {"decode": multiple, "mixed": math.lcm(multiple, token_multiple)}
        _check_given(given, max_num_seqs, max_num_batched_tokens, multiples)
        if skips_padding:
            fewest = _FEWEST_TOKENS if max_samples == 1 else max_num_batched_tokens
            defaults = _eighths(_FEWEST_ROWS, max_num_seqs), _eighths(fewest, max_num_batched_tokens)
        else:
            halfway = max_samples == 1
            few_from = 16 if halfway and max_num_seqs <= _FEW_ROWS else max_num_seqs
            smallest = min(_SMALLEST_MIXED, max_num_batched_tokens)
            many_from = 64 if halfway else max_num_batched_tokens
            defaults = _ladder(1, max_num_seqs, few_from), _ladder(smallest, max_num_batched_tokens, many_from)
        decode, mixed = (
            tuple(sorted({_round_up(size, to) for size in given.get(kind) or sizes}))
            for (kind, to), sizes in zip(multiples.items(), defaults, strict=True)
        )
        drafts = draft_rows(max_num_seqs, skips_padding) if max_samples > 1 else ()
        rows = tuple(sorted({_round_up(size, multiple) for size in drafts}))
        samples = max_samples, None if max_step_samples is None else _round_up(max_step_samples, multiple)
        return cls(decode, mixed, max_num_seqs, table_pages, multiple, *samples, rows, num_tables)

    def shapes(self) -> list[BatchShape]:
        """Return all shapes except ``scoring_shape``, decode shapes first."""
        return [*self._decode_shapes, *self._draft_shapes, *self._mixed_shapes]

    def shape_for(self, num_tokens: int, decode_only: bool) -> BatchShape:
        """Return the smallest shape that holds a step of ``num_tokens`` query tokens.

        A decode step with more rows than the largest decode shape runs in a mixed shape.
        """
        if decode_only and num_tokens <= self.decode_rows[-1]:
            return self._decode_shapes[bisect.bisect_left(self.decode_rows, num_tokens)]
        return self._mixed_shapes[bisect.bisect_left(self.mixed_tokens, num_tokens)]

    def draft_shape_for(self, num_rows: int, num_tokens: int) -> BatchShape:
        """Return the smallest shape that holds a decode step with drafts."""
        fitting = (s for s in self._draft_shapes if s.num_rows >= num_rows and s.num_tokens >= num_tokens)
        return next(fitting, None) or self.shape_for(num_tokens, decode_only=False)

    @property
    def scoring_shape(self) -> BatchShape:
        """The one shape for steps with prompt logprobs on accelerators, where they are rare."""
        return self._shape(self.mixed_tokens[-1], scores_prompt=True)

    @functools.cached_property
    def _decode_shapes(self) -> list[BatchShape]:
        return [self._shape(rows, rows, max_samples=1) for rows in self.decode_rows]

    @functools.cached_property
    def _draft_shapes(self) -> list[BatchShape]:
        most = self.mixed_tokens[-1] if self.max_step_samples is None else self.max_step_samples
        tokens = (_round_up(min(rows * self.max_samples, most), self.multiple) for rows in self.draft_rows)
        return [self._shape(*size) for size in zip(tokens, self.draft_rows, strict=True)]

    @functools.cached_property
    def _mixed_shapes(self) -> list[BatchShape]:
        return [self._shape(tokens) for tokens in self.mixed_tokens]

    def _shape(
        self, num_tokens: int, num_rows: int | None = None, max_samples: int | None = None, scores_prompt: bool = False
    ) -> BatchShape:
        """Return a decode shape for ``num_rows`` sequences, or a mixed one for as many as a step can have."""
        return BatchShape(
            num_tokens=num_tokens,
            num_rows=min(_round_up(self.max_num_seqs, self.multiple), num_tokens) if num_rows is None else num_rows,
            table_pages=self.table_pages,
            decode_only=num_rows is not None,
            scores_prompt=scores_prompt,
            max_samples=self.max_samples if max_samples is None else max_samples,
            max_step_samples=self.max_step_samples if num_rows is None else None,
            num_arguments=self.num_arguments,
            num_tables=self.num_tables,
            state_distance=self.state_distance,
        )


def draft_rows(max_num_seqs: int, skips_padding: bool) -> tuple[int, ...]:
    """Return the rows of the decode shapes with drafts, which shapes without also have if a model on the device drafts
    after each step; the arguments are those of ``Buckets.make``."""
    return _eighths(_FEWEST_ROWS if skips_padding else 1, max_num_seqs)


def _check_given(
    given: Mapping[str, Sequence[int]],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    multiples: Mapping[str, int],
) -> None:
    """Check ``compile_sizes`` against the largest steps; the message has sizes before rounding to ``multiples``."""
    limits = {"decode": ("max_num_seqs", max_num_seqs), "mixed": ("max_num_batched_tokens", max_num_batched_tokens)}
    for kind, sizes in given.items():
        setting, limit = limits[kind]
        largest = max(sizes)
        stated = f"{setting}={limit} (the default depends on the device)"
        if largest > limit:
            raise ConfigError(
                f"compile_sizes.{kind}: expected sizes up to {stated}, got {largest}, which no step would use; "
                f"remove it from the list or raise {setting}"
            )
        if kind == "mixed" and _round_up(largest, multiples[kind]) < _round_up(limit, multiples[kind]):
            raise ConfigError(
                f"compile_sizes.mixed: the largest size must hold a step of {stated}, got {sorted(sizes)}; "
                f"add {limit} to the list or lower {setting} to {largest}"
            )


def _ladder(first: int, last: int, half_steps_from: int) -> tuple[int, ...]:
    """Return ``first`` times powers of two, and from ``half_steps_from`` on the sizes halfway, up to ``last``."""
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        if size >= half_steps_from and size * 3 // 2 < last:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, last)


def _eighths(fewest: int, last: int) -> tuple[int, ...]:
    """Return ``last``, an eighth of it, and so on, down to ``fewest``."""
    sizes = [last]
    while sizes[-1] // 8 >= fewest:
        sizes.append(sizes[-1] // 8)
    return tuple(sizes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
