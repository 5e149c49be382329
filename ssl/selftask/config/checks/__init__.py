"""Checks of a config across its sections."""
