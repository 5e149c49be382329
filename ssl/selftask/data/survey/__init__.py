"""Looking at a whole data set before training on it: what is broken, how large, how bright."""
