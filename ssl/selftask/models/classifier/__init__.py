"""Classifiers: a backbone with one head or several, each a chain of blocks by name."""
