"""Commands that monitor runs: ``runs`` and ``watch``."""
