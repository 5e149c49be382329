"""From a recipe and ``key=value`` to one validated, typed, explained Config."""
