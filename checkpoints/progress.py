"""A progress bar for loads that take long enough to ask for one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

DELAY_S = 1.5


@contextmanager
def progress_bar(
    total_bytes: int, description: str = "Loading weights", is_forced: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show bytes loaded on stderr, once the load has taken 1.5 s.

    Args:
        total_bytes: what the load comes to.
        description: text before the bar.
        is_forced: show the bar from the start.

    Yields:
        The function to pass as `progress`: takes bytes done and bytes in total.
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
