"""Backbones, their features, heads, losses, teachers and weights."""
