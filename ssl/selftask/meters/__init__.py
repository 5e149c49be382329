"""Meters of test phases; each is registered under the name of its file."""
