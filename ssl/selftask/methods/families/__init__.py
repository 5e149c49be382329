"""Families: base classes for code that several methods share. A method may extend several.

A family extends only ``Method`` and classes of its own file, so that a reader of a method opens one
file for each of its bases. Hook points and ``setup`` call ``super()``, since a method may have
several families.
"""
