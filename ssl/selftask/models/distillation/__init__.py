"""Distillation of scores: a network that scores patches too, and a teacher's targets."""
