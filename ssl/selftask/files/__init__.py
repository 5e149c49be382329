"""Files and folders that users name: local paths, and addresses through iopath."""
