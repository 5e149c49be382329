"""Ends of a run: signals, early stopping, injected faults."""
