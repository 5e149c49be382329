"""Features of any backbone in one form: pooled, prefix tokens, patches, hidden layers."""
