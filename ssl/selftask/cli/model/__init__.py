"""Commands for trained models."""
