"""Batched forms of the transforms, registered by the name of the transform."""
