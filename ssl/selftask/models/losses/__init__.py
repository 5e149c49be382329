"""Parts of losses that several methods share, as pure functions."""
