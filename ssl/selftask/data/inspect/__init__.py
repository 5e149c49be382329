"""Inspection of a data set for `selftask data` and `selftask bench`."""
