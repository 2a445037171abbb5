"""One engine over several processes: they join, agree on what they run, and every one launches each step."""
