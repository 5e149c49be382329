"""Averages of the weights."""
