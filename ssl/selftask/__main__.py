"""``python -m selftask`` is the same as ``selftask``."""

from __future__ import annotations

import sys

from selftask.cli.main import main

sys.exit(main())
