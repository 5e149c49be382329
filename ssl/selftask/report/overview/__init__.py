"""All runs below a folder: their states, newest values, and the table of them."""
