"""Meters of test phases and of ``train_meters``; each is registered by the name of its file."""
