"""Loading and exporting weights."""
