"""Sections of a report that show images."""
