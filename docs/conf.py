"""Sphinx's settings: ``make docs`` writes docs/_build/html, which needs no network to be read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tools")]

_INIT = (ROOT / "ssl/selftask/__init__.py").read_text(encoding="utf-8")

project = "selftask"
author = "the selftask authors"
project_copyright = "the selftask authors, Apache License 2.0"
version = release = re.findall(r'__version__ = "(.+)"', _INIT)[0]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "manual.docstrings",
    "manual.source_pages",
    "manual.reference_pages",
    "manual.method_pages",
]
exclude_patterns = ["_build"]
nitpicky = True  # a reference that leads nowhere is a warning, and a warning fails `make docs`
nitpick_ignore_regex = [
    # annotations: other packages, whose inventories would need the network; type variables
    ("py:.*", r"(ast|classy_vision|collections|contextlib|dataclasses|fvcore)\..*"),
    ("py:.*", r"(numpy|pathlib|torch)\..*"),
    ("py:class", r"(Tensor|(nn\.)?Module|TrainConfig|selftask\..*\.[PRT]|[A-Z0-9]|float32)"),
    # classes of selftask that are no API
    ("py:class", r"Component"),
    ("py:class", r"selftask\.(config\.schema|data\.reading|data\.loading)\..*"),
]

viewcode_follow_imported_members = False  # or it links to a page of builtins
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = ["Shape"]

nb_execution_mode = "off"  # notebooks are shown with the outputs that they have
myst_heading_anchors = 4  # the anchors of headings are GitHub's
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]

html_theme = "furo"
html_title = f"selftask {version}"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]
html_copy_source = False
html_show_sphinx = False
