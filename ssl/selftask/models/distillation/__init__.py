"""Frozen teachers and tokenizers: targets of scores and patches, codes, and networks of patches."""
