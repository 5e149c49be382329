"""Copies of files on a faster disk."""
