"""`eformer quantize --calibrate TEXT`: a model (folder or GGUF file) reads a text, so that methods know its inputs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from eformer._calibrate import calibrate
from eformer._quantize.leaves import nbytes_of, open_tree
from eformer._quantize.plan import Plan
from eformer._quantize.report import report
from eformer._quantize.tree import Reporter, quantize_tree
from eformer.models import Model, forward, load, save_folder
from eformer.models._adapter import file_names, save_file
from eformer.serialization import StreamReport
from eformer.serialization.streaming.quantize_file import StreamedLeaf

from ._commands import Failure, WrongUse

WINDOW, BATCH, TOKENS = 256, 4, 8192


def write_calibrated(
    options: argparse.Namespace, planned: Plan, size: Any, tell: Reporter, metadata: Mapping[str, str]
) -> StreamReport:
    """Do what was planned for the tensors of a model, with statistics of what it multiplies them with.

    `metadata` goes into the file that a GGUF file becomes.
    """
    begun = time.perf_counter()
    model = load(options.source, dense=True)
    if model.tokenizer is None:
        raise Failure(f"{options.source}: --calibrate needs a tokenizer to read the text, and none can be loaded.")
    statistics = calibrate(functools.partial(forward, model.config), model.params, _batches(options, model))
    names, decided = file_names(model), {".".join(d.leaf.names): d for d in planned.decisions}
    dense = {leaf.path: nbytes_of(leaf.value) for leaf in open_tree(model.params).leaves}
    rules = [(path, _turned(decided[name].config, name, model)) for path, name in names.items() if name in decided]
    made = quantize_tree(
        model.params, rules, default=None, min_size=0, skip=(), progress=tell, calibration=statistics,
        method=options.method,
    )  # fmt: skip
    changed = dataclasses.replace(model, params=made)
    if model.folder is None:
        save_file(options.target, changed, metadata, size)
    else:
        save_folder(options.target, changed, max_shard_size=size)
    leaves = tuple(
        StreamedLeaf(names[leaf.path], None, leaf.format, dense[leaf.path], leaf.nbytes, leaf.method or "")
        for leaf in report(made).leaves
    )
    return StreamReport(options.target, leaves, planned.unused, 0, time.perf_counter() - begun)


def _turned(config: Any, name: str, model: Model) -> Any:
    """A configuration of a matrix as the file has it, (out, in), for the same one as the model has it."""
    if config is None or name.endswith(("embed_tokens.weight", "token_embd.weight")):
        return config
    swapped = {-1: -2, -2: -1, 0: -1, 1: -2, (-1,): -2, (-2,): -1}
    return dataclasses.replace(config, axis=swapped.get(config.axis, config.axis))


def _batches(options: argparse.Namespace, model: Model) -> list[np.ndarray]:
    text = options.calibrate.read_text("utf-8", "replace")
    assert model.tokenizer is not None
    tokens = np.asarray(model.tokenizer.encode(text), np.int32)[: options.calibration_tokens]
    if len(tokens) < 2:
        raise WrongUse(f"--calibrate {options.calibrate} holds {len(tokens)} tokens; give a text that is longer.")
    window = min(WINDOW, len(tokens))
    windows = tokens[: len(tokens) // window * window].reshape(-1, window)
    return [windows[i : i + BATCH] for i in range(0, len(windows), BATCH)]


def check(options: argparse.Namespace, to_folder: bool) -> None:
    """Refuse methods without a text, and a text for what cannot be run."""
    if options.calibrate is None:
        if options.method in ("gptq", "awq", "awq+gptq"):
            raise WrongUse(f"--method {options.method} looks at the inputs of matrices: give a text, --calibrate FILE.")
        return
    if not to_folder and options.source.suffix != ".gguf":
        raise WrongUse(
            "--calibrate runs the model: the source must be a folder with config.json and a tokenizer, and the target "
            "a folder, too; or a GGUF file, and the target a safetensors file."
        )
    if not options.calibrate.is_file():
        raise WrongUse(f"--calibrate {options.calibrate}: there is no such file.")
    if options.calibration_tokens < 2:
        raise WrongUse(f"--calibration-tokens {options.calibration_tokens} must be 2 or more.")


def with_method(planned: Plan, method: str | None) -> Plan:
    """The plan with a method for every leaf that has none."""
    if method is None:
        return planned
    decisions = tuple(
        d
        if d.config is None or d.config.method
        else dataclasses.replace(d, config=dataclasses.replace(d.config, method=method))
        for d in planned.decisions
    )
    return dataclasses.replace(planned, decisions=decisions)
