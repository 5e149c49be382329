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

extensions = ["myst_parser", "manual.source_pages"]
exclude_patterns = ["_build"]
nitpicky = True  # a reference that leads nowhere is a warning, and a warning fails `make docs`

myst_heading_anchors = 4  # the anchors of headings are GitHub's
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]

html_theme = "furo"
html_title = f"selftask {version}"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]
html_copy_source = False
html_show_sphinx = False
