"""The ``selftask`` command, with one module for each subcommand."""
