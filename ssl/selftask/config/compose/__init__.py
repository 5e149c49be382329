"""A config as nested values: recipes, short forms, overrides, and the origin of each value."""
