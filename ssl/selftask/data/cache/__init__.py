"""Decoded images kept in memory, on disk or on the device."""
