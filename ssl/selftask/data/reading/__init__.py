"""Reading image files, archives and lists of paths, damaged ones included."""
