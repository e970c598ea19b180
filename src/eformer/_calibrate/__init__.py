"""What runs models to learn about them: `calibrate`."""

from __future__ import annotations

from .calibrate import calibrate as calibrate
