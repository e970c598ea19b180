"""The quantized formats, one folder each; importing the room registers what their arrays do in products and shapes."""

from __future__ import annotations

from . import handlers as handlers
