"""Report of a run: one HTML page with curves, events and a verdict."""
