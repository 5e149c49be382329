"""``selftask plan``: the cost of a run, computed from shapes before it starts."""
