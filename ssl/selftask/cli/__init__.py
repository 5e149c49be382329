"""The ``selftask`` command; each subcommand is one module here."""
