"""What runs models to learn about them, to judge them and to improve them."""

from __future__ import annotations

from .calibrate import calibrate as calibrate
