"""Files of PyTorch (`pytorch_model.bin`, `.pt`, `.pth`), read by torch itself and never by plain unpickling.

A pickle may run any program when it is read; `torch.load(weights_only=True)` refuses all but tensors and containers.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

from ..safetensors.header import Entry, Header, about, named_dtype
from ..safetensors.reading import MappedFile, open_regular, owned

SUFFIXES = (".bin", ".pt", ".pth")
_CHUNK = 1 << 23


class TorchFile(MappedFile):
    """Such a file, read as if it were one of safetensors."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)
        self._tensors = _loaded(self.path)
        entries = {}
        for name, tensor in self._tensors.items():
            with about(self.path, name):
                dtype = _dtype_of(tensor)
            entries[name] = Entry(name, dtype, tuple(tensor.shape), 0, tensor.numel() * dtype.itemsize)
        self.header = Header(entries, {}, 0)

    def view(self, name: str) -> np.ndarray:
        return self._bytes(self.entry(name))

    def _bytes(self, entry: Entry) -> np.ndarray:
        import torch  # pyright: ignore[reportMissingImports]

        flat = self._tensors[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat.view(entry.dtype).reshape(entry.shape)

    def read_into(self, buffer: np.ndarray, name: str) -> np.ndarray:
        found = self.view(name)
        made = buffer[: found.nbytes].view(found.dtype).reshape(found.shape)
        made[...] = found
        return made

    def read_piece(self, name: str, piece: int, count: int) -> np.ndarray:
        found = self.view(name)
        return owned(found if count == 1 else np.split(found, count)[piece])

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        flat = self.view(name).reshape(-1).view(np.uint8)
        return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))

    def announce(self, name: str) -> None:
        del name


def _dtype_of(tensor: Any) -> np.dtype:
    layout = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
    if layout != "torch.strided":
        raise CheckpointError(f"is a tensor of torch that is not plain, but {layout}.", fix="Save its dense values.")
    return named_dtype(str(tensor.dtype).removeprefix("torch."))


def _loaded(path: Path) -> dict[str, Any]:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as err:
        raise CheckpointError(
            "is a file of PyTorch, which is not installed.",
            file=path,
            fix="Install torch, or convert the file to safetensors.",
        ) from err
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            found = torch.load(path, mmap=True, **options)
        except RuntimeError:  # a file of before 1.6 cannot be mapped
            found = torch.load(path, **options)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as err:
        what = f"cannot be read by torch.load(weights_only=True): {' '.join(str(err).split())[:300]}"
        raise CheckpointError(what, file=path, fix="Get the weights as safetensors.") from err
    tensors = isinstance(found, dict) and all(isinstance(k, str) and torch.is_tensor(v) for k, v in found.items())
    if not tensors:
        raise CheckpointError("is not a dict of tensors.", file=path, fix="Save the state_dict of the model alone.")
    return {name: tensor.detach() for name, tensor in found.items()}
