"""Amounts of time and memory, conversion to annotated types, automatic values."""
