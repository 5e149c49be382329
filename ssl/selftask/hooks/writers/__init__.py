"""Writers: hooks that also write the rows of a run elsewhere."""
