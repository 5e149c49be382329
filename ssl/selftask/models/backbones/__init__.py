"""Backbones by name. Each is a dataclass of what can be chosen, with ``build() -> nn.Module``;
``build(channels)`` where it can be made for images of other than three.

A backbone maps images (B, C, H, W) to features (B, E) and keeps the parameter names of the library
it comes from. ``models/build.py`` makes one and sees to its ``embed_dim``.
"""
