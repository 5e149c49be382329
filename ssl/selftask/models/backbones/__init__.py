"""Backbones by name. Each is a dataclass of what can be chosen, with ``build() -> nn.Module``;
``build(channels)`` where it can be made for images of other than three.

A class attribute ``offers`` names what the backbone gives beside pooled features (``"tokens"``,
``"dense"``: words of ``Method.requires``); without it this is known once it is built.

A method ``tiny`` returns name and arguments of a tiny network of the same kind, for images of 32
pixels, as in a recipe; without it a tiny recipe keeps the backbone. ``library`` is what ``build``
imports that takes seconds.

A backbone of patches has fields ``img_size`` and ``patch_size``, and ``dynamic_img_size`` if its
grid can change. One that keeps them in another field names that field in ``sizes_in``, and answers
by a method ``grid`` (their values) and a property ``size_argument`` (the key that is the size).

A backbone maps images (B, C, H, W) to features (B, E) and keeps the parameter names of the library
it comes from. ``models/build.py`` makes one and sees to its ``embed_dim``.
"""
