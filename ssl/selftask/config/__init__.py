"""Build a validated, typed Config from a recipe and ``key=value`` overrides."""
