"""Batched versions of the transforms, registered by the name of the transform."""
