"""The closed set of batch shapes that are compiled; a step takes the smallest that holds it."""

import bisect
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jaxserve.device.step_batch import BatchShape
from jaxserve.errors import ConfigError

_SMALLEST_MIXED = 64
_FEW_ROWS = 64
_FEWEST_ROWS, _FEWEST_TOKENS = 8, 128  # of a shape when padding is almost free


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Rows of decode steps and tokens of mixed steps, ascending.

    Attributes:
        decode_rows: Rows of each decode shape.
        mixed_tokens: Query tokens of each mixed shape.
        max_num_seqs: Most rows of a mixed step.
        table_pages: M, pages of the longest context.
        multiple: Rows and tokens of every shape are multiples of it.
        max_samples: Most tokens that a row of a mixed step samples: one, and one for each draft.
        num_tables: Page tables of each row.
    """

    decode_rows: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    max_num_seqs: int
    table_pages: int
    multiple: int = 1
    max_samples: int = 1
    num_tables: int = 1

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
        num_tables: int = 1,
    ) -> "Buckets":
        """Take the sizes in ``compile_sizes``, and the default ladder for a kind of step that it leaves out.

        The ladder is powers of two; from 64 tokens on also the sizes halfway, so that at most a third of a mixed step
        is padding. Decode rows have sizes halfway (from 16 on) only where few rows are asked for: programs are to be at
        most 40. Where kernels skip padding (``skips_padding``) it is the largest size and eighths of it.

        Raises:
            ConfigError: A given size is larger than any step, or the largest mixed size does not hold every step.
        """
        given = compile_sizes or {}
        _check_given(given, max_num_seqs, max_num_batched_tokens, multiple)
        if skips_padding:
            defaults = _eighths(_FEWEST_ROWS, max_num_seqs), _eighths(_FEWEST_TOKENS, max_num_batched_tokens)
        else:
            few_from = 16 if max_num_seqs <= _FEW_ROWS else max_num_seqs
            smallest = min(_SMALLEST_MIXED, max_num_batched_tokens)
            defaults = _ladder(1, max_num_seqs, few_from), _ladder(smallest, max_num_batched_tokens, 64)
        decode, mixed = (given.get(kind) or sizes for kind, sizes in zip(("decode", "mixed"), defaults, strict=True))
        decode, mixed = (tuple(sorted({_up(size, multiple) for size in sizes})) for sizes in (decode, mixed))
        return cls(decode, mixed, max_num_seqs, table_pages, multiple, max_samples, num_tables)

    def shapes(self) -> list[BatchShape]:
        """Every shape, decode steps first, without the ``scoring_shape``."""
        return [*self._decode_shapes, *self._mixed_shapes]

    def shape_for(self, num_tokens: int, decode_only: bool) -> BatchShape:
        """Return the smallest shape that holds a step of ``num_tokens`` query tokens.

        A decode step with more rows than the largest decode shape takes a mixed shape.
        """
        if decode_only and num_tokens <= self.decode_rows[-1]:
            return self._decode_shapes[bisect.bisect_left(self.decode_rows, num_tokens)]
        return self._mixed_shapes[bisect.bisect_left(self.mixed_tokens, num_tokens)]

    @property
    def scoring_shape(self) -> BatchShape:
        """The shape of steps that score prompts on accelerators: one for all of them, since they are rare."""
        return self._shape(self.mixed_tokens[-1], scores_prompt=True)

    @functools.cached_property
    def _decode_shapes(self) -> list[BatchShape]:
        return [self._shape(rows, decode_only=True) for rows in self.decode_rows]

    @functools.cached_property
    def _mixed_shapes(self) -> list[BatchShape]:
        return [self._shape(tokens) for tokens in self.mixed_tokens]

    def _shape(self, num_tokens: int, decode_only: bool = False, scores_prompt: bool = False) -> BatchShape:
        return BatchShape(
            num_tokens=num_tokens,
            num_rows=num_tokens if decode_only else min(_up(self.max_num_seqs, self.multiple), num_tokens),
            table_pages=self.table_pages,
            decode_only=decode_only,
            scores_prompt=scores_prompt,
            max_samples=1 if decode_only else self.max_samples,
            num_tables=self.num_tables,
        )


def _check_given(
    given: Mapping[str, Sequence[int]], max_num_seqs: int, max_num_batched_tokens: int, multiple: int
) -> None:
    """Check sizes from ``compile_sizes`` against the largest steps, before both are rounded up to ``multiple``."""
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
        if kind == "mixed" and _up(largest, multiple) < _up(limit, multiple):
            raise ConfigError(
                f"compile_sizes.mixed: the largest size must hold a step of {stated}, got {sorted(sizes)}; "
                f"add {limit} to the list or lower {setting} to {largest}"
            )


def _ladder(first: int, last: int, half_steps_from: int) -> tuple[int, ...]:
    """Powers of two times ``first``, from ``half_steps_from`` on also the sizes halfway, up to ``last``."""
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        if size >= half_steps_from and size * 3 // 2 < last:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, last)


def _eighths(fewest: int, last: int) -> tuple[int, ...]:
    """``last``, an eighth of it, and so on, as long as that is not below ``fewest``."""
    sizes = [last]
    while sizes[-1] // 8 >= fewest:
        sizes.append(sizes[-1] // 8)
    return tuple(sizes)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
