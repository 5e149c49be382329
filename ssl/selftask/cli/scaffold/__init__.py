"""`selftask new`: the first files of a method, hook, train step or project."""
