"""Instance retrieval: find images of the same object or scene by frozen features."""
