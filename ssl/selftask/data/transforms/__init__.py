"""Image transforms, registered by name; every draw comes from an explicit generator."""
