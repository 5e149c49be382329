"""What is kept of a failed step."""
