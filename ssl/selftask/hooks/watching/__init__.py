"""Figures of a run: health, times, memory, layers."""
