"""Ways to end a run: signals, early stopping, injected faults."""
