"""Parts of losses shared by several methods, as pure functions."""
