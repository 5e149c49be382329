"""Self-supervised methods, one per file with its head, loss, memory and hook points."""
