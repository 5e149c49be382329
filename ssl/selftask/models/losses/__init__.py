"""Parts of losses shared by several methods: pure functions, and constants that they need."""
