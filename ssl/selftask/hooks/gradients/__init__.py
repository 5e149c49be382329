"""Gradients: clipping and statistics."""
