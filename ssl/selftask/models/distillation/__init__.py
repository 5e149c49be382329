"""Distillation of scores: a network that also scores patches, and targets of a teacher."""
