"""Features of any backbone in a common form: pooled, prefix tokens, patches, hidden layers."""
