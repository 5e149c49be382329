"""Networks that predict patches from encoded ones."""
