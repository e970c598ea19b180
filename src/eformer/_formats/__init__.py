"""The quantized formats, one folder each; importing the room registers what their arrays do in products and shapes."""

from __future__ import annotations

from . import collectives as collectives
from . import dot as dot
from . import lookup as lookup
from . import shapes as shapes
from .activations import products as products
from .cache import attention as attention
from .cache import write as write
