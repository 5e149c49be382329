"""Dumps of failed steps, and the check for NaN and infinity."""
