"""``selftask plan``: what a run costs, computed from shapes before it is started."""
