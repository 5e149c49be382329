"""Sources of images, registered by name; nothing here imports torch."""
