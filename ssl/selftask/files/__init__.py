"""Files and folders that users name."""
