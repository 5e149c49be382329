"""Registered samplers: which images an epoch shows, and in which order."""
