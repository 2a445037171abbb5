"""A progress bar for loads that take longer than 1.5 s."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_S = 1.5


@contextmanager
def progress_bar(
    total_bytes: int, description: str = "Loading weights", is_forced: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show loaded bytes on stderr once the load has taken 1.5 s.

    Args:
        total_bytes: bytes of the whole load.
        description: text before the bar.
        is_forced: show the bar immediately.

    Yields:
        The function to pass as `progress`: it takes loaded bytes and total bytes.
    """
    delay_s = 0.0 if is_forced else DELAY_S
    with tqdm(
        total=total_bytes,
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        file=sys.stderr,
        delay=delay_s,
    ) as bar:

        def show(done_bytes: int, total: int) -> None:
            bar.total = total
            bar.update(done_bytes - bar.n)

        yield show
