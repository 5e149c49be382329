"""Overview of all runs below a folder: states, newest values, table."""
