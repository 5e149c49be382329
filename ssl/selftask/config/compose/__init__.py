"""A config as nested values: recipes, short forms, overrides, and where each value comes from."""
