"""Backbones by name. Each is a dataclass of what can be chosen, with ``build() -> nn.Module``.

A backbone maps images (B, 3, H, W) to features (B, E) and keeps the parameter names of the library
it comes from. ``models/build.py`` makes one and sees to its ``embed_dim``.
"""
