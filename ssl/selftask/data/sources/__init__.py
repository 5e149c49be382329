"""Image sources, registered by name; importing them does not import torch."""
