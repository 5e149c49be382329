"""Live pages of a folder of runs, served on this machine."""
