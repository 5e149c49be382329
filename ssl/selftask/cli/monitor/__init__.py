"""Commands that watch runs: ``runs``, ``watch``."""
