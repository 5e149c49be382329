"""Evaluations of patch features: images and masks, patches, heads, metrics."""
