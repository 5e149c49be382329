"""Commands that submit, list and cancel jobs."""
