"""Backbones, features of any of them, heads, losses, teachers, weights."""
