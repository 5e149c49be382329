"""The order of samples, registered by name."""
