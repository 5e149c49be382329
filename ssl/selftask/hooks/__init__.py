"""Hooks that come with selftask, registered under the names that the section ``hooks`` uses."""
