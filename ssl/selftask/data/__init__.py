"""Data pipeline: sources, sample order, views and loading."""
