"""The command ``adapt``."""
