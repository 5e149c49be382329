"""Samples, batches, and the workers that make them."""
