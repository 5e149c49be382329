"""Hooks that come with selftask; each is registered under the name of its file."""
