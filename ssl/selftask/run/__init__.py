"""Running a task: folder, log, ranks, watchdog, exit."""
