"""Parts of the method `distill`: a network with scores of patches, and targets from scores."""
