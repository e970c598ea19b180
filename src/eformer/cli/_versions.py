"""Versions of what is installed."""

from __future__ import annotations

import importlib.metadata


def version(name: str) -> str:
    """The version of a distribution, also when it is run from its sources without being installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
