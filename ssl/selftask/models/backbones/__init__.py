"""Backbones by name. Each is a dataclass of options with a method ``build() -> nn.Module``, or
``build(channels)`` if it can be made for other numbers of channels than three.

A class attribute ``offers`` lists what the backbone returns beside pooled features (``"tokens"``,
``"dense"``: words of ``Method.requires``). Without it this is known only after building.

A method ``tiny`` returns name and arguments of a tiny network of the same kind for images of 32
pixels, as in a recipe; without it a tiny recipe keeps the backbone. ``library`` names a module
that ``build`` imports and that takes seconds to import.

A backbone of patches has fields ``img_size`` and ``patch_size``, and ``dynamic_img_size`` if its
grid can change. A backbone that keeps them in another field names that field in ``sizes_in`` and
has a method ``grid`` (their values) and a property ``size_argument`` (the key of the image size).

A backbone maps images (B, C, H, W) to features (B, E) and keeps the parameter names of its library.
``models/build.py`` builds it and checks its ``embed_dim``.
"""
