"""Where images come from, registered by name; nothing here imports torch."""
