"""Statistics of a run: health, times, memory, layers."""
