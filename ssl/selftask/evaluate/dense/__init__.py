"""Parts of evaluations of patch features, such as segmentation: images, heads, metrics."""
