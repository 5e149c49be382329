"""Run a task: run folder, log, ranks, watchdog, exit code."""
