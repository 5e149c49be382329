"""Reading of image files, archives and lists of paths, including damaged ones."""
