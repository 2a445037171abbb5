"""Choose the scheduler of a new request: the one with the longest cached prefix among those with a bounded load."""

import collections.abc

from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence


def choose_scheduler(schedulers: collections.abc.Sequence[Scheduler], sequence: Sequence) -> int:
    """Return the index of the scheduler to add a new sequence to; change nothing.

    Candidates have at most ``max_num_seqs // 4`` more unfinished sequences than the least loaded scheduler. The one
    with the longest cached prefix, in full pages, is chosen; of equal ones the least loaded, then the first. Nothing is
    looked up if there is one candidate.
    """
    if len(schedulers) == 1:
        return 0
    loads = [scheduler.num_unfinished for scheduler in schedulers]
    least = min(loads)
    candidates = [i for i, load in enumerate(loads) if load - least <= schedulers[i].limits.max_num_seqs // 4]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda i: (-schedulers[i].pages.num_cached_tokens(sequence), loads[i], i))
