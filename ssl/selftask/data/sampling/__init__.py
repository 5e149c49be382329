"""Samplers, which define the samples of an epoch and their order; registered by name."""
