"""The names of the formats, and what other spellings of them are likely to mean."""

from __future__ import annotations

import difflib
import enum
import re
from typing import Any

import numpy as np


class QuantizationType(enum.StrEnum):
    """The names of the formats."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"
    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    MXFP8_E5M2 = "mxfp8_e5m2"
    NVFP4 = "nvfp4"
    IQ4_NL = "iq4_nl"


# What other programs call a format, in lower case and without signs.
_ALIASES = {"4bit": "nf4", "8bit": "int8", "1bit": "binary", "fp4": "mxfp4", "q40": "int4", "q80": "int8", "w8": "int8"}
_ALIASES |= {"w4": "int4", "float8": "fp8", "float8e4m3fn": "fp8", "float8e4m3": "fp8", "float8e5m2": "fp8_e5m2"}
_ALIASES |= {"fp8e4m3": "fp8", "e4m3": "fp8", "e5m2": "fp8_e5m2", "float4e2m1fn": "mxfp4", "iq4xs": "iq4_nl"}
_ALIASES |= {"w4a16": "int4", "w8a16": "int8", "q41": "int4"}
_ALIASES |= {"uint8": "int8", "uint4": "int4", "i8": "int8", "i4": "int4", "bitsandbytes": "nf4", "bnb": "nf4"}


def known_type(name: QuantizationType | str) -> QuantizationType:
    try:
        return QuantizationType(name)
    except ValueError as err:
        supported = ", ".join(t.value for t in QuantizationType)
        hint = f" Did you mean {near!r}?" if (near := meant(name)) else ""
        raise ValueError(f"Unsupported quantization type: {name!r}.{hint} Supported types: {supported}.") from err


def meant(name: Any) -> str:
    """The format that a name of another spelling, or a dtype, is likely to stand for."""
    try:
        text = name if isinstance(name, str) else np.dtype(name).name
    except TypeError:
        return ""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    names = {re.sub(r"[^a-z0-9]", "", kind): kind.value for kind in QuantizationType}
    near = difflib.get_close_matches(plain, names, 1, 0.8)
    return names.get(plain) or _ALIASES.get(plain) or (names[near[0]] if near else "")
