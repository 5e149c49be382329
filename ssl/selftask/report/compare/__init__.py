"""Comparison of several runs on one page: differences, results, overlaid curves."""
