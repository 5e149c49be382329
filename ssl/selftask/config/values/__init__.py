"""Conversion of values to annotated types, lengths of training, memory sizes, automatic values."""
