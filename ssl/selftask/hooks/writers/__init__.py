"""Writers: hooks that send the rows of ``metrics.jsonl`` to other files and services."""
