"""`python -m eformer`."""

from __future__ import annotations

import sys

from eformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
