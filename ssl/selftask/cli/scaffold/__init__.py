"""``selftask new``: templates for a method, hook, train step or project."""
