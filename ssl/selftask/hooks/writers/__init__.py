"""Writers: hooks that write the rows of a run elsewhere, too."""
