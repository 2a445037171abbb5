"""The ticks of a pipeline, in each of which its stages move on by one plan."""

import itertools
from collections.abc import Iterator


def num_idle_stages(newest_first: Iterator[object], num_stages: int, num_runnable: int) -> int:
    """Return the number of stages that are idle in a tick.

    In tick t, stage i works on the plan of tick t - i. A tick at which no lane has a plan is a bubble, for which
    nothing is launched. It counts among the ticks in flight, so that the tokens sampled S ticks ago can be used
    although fewer requests are running than there are stages.

    A stage is idle in a tick if it has no plan to work on although at least S sequences are runnable, one for each
    stage: it is a bubble's turn, or the pipeline is filling after it was empty. Sequences are runnable if they have a
    slot and tokens left to plan that do not wait for the host (``Scheduler.num_runnable``). So a stage without work is
    not idle while fewer than S sequences run, as at the end of a load.

    Args:
        newest_first: The ticks in flight, the tick in question first; None for a bubble.
        num_stages: Number of stages S.
        num_runnable: Number of runnable sequences of all lanes.
    """
    if num_runnable < num_stages:
        return 0
    return num_stages - sum(tick is not None for tick in itertools.islice(newest_first, num_stages))
