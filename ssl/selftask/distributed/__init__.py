"""Ranks of a run: who they are, how they talk, and whether they are alive."""
