"""Backbones by name.

Each is a dataclass of options with a method ``build() -> nn.Module``, or ``build(channels)`` if it
supports other numbers of channels than three.

A class attribute ``offers`` lists what the backbone returns in addition to pooled features, in the
terms of ``Method.requires`` (``"tokens"``, ``"dense"``). Without it, this is known only after
building.

A method ``tiny`` returns the config of a tiny backbone of the same kind for images of 32 pixels.
Without it, a tiny recipe keeps the backbone. A class attribute ``library`` names a slow module that
``build`` imports.

A backbone that divides images into patches has fields ``img_size`` and ``patch_size``, and
``dynamic_img_size`` if its grid can change. If these values are in another field, the class
attribute ``sizes_in`` names that field, a method ``grid`` returns the values, and a property
``size_argument`` is the key of the image size.

A backbone maps images (B, C, H, W) to features (B, E) and uses the parameter names of its library.
``models/build.py`` builds it and sets its ``embed_dim`` if it has none.
"""
