"""Random numbers as pure functions of what they are for, with no generator to save."""
