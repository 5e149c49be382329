"""Texts to token ids, registered by name; nothing here imports torch."""
