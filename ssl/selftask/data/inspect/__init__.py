"""Inspection of data sets, for ``selftask data`` and ``selftask bench``."""
