"""Alignment and uniformity, a method for selftask."""
