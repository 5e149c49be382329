"""Train steps; each is registered under the name of its file."""
