"""Families: base classes for code that several methods share. A method may extend several.

A family extends only ``Method`` and classes of its own file, so that a reader of a method opens one
file for each of its bases. Families that are combined, such as ``EMATeacher`` with others, call
``super()`` in the hook points that they share, and in ``setup``.
"""
