"""Ways to choose codes and scales: "round", "scale", "gptq", "awq", "awq+gptq".

Each takes a weight, the statistics of its inputs and a format, and gives an array of that format.
"""

from __future__ import annotations

from ..config import BY_METHOD
from .choose import Chosen as Chosen
from .choose import choose as choose
from .encode import encode as encode
from .fold import Folding as Folding

BY_METHOD.append(encode)
