"""The commands ``selftask data check``, ``stats`` and ``show``."""
