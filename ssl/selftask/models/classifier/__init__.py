"""Classifiers: a backbone with one or several heads, each a sequence of blocks by name."""
