"""Check that W ranks with B / W samples each are equivalent to one rank with B samples."""
