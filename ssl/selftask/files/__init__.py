"""Files and folders given by users: local paths, and addresses through iopath."""
