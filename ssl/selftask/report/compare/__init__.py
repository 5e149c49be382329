"""Several runs on one page: what differs, what they reached, curves over each other."""
