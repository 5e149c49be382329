"""Checkpoints: files that survive a crash, and how they are written and found again."""
