"""Writing, finding and reading checkpoints that survive a crash."""
