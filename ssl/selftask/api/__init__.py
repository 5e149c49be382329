"""The Python API, for notebooks and scripts: see ``docs/python.md``."""
