"""From files to batches: sources, views, order, loading."""
