"""Conversations as the text a model was trained on: chat templates, by the package `jinja2` (the extra `models`)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from eformer.errors import CheckpointError

from ._generate import Model

Message = Mapping[str, Any]  # a "role" ("system", "user", "assistant") and its "content"


def chat_text(model: Model, messages: Sequence[Message], **more: Any) -> str:
    """The conversation in the words of the model, up to where its answer begins.

    Args:
        model: what `load` gave, with the template of its folder or file.
        messages: what was said, as `{"role": "user", "content": "..."}`.
        more: variables for the template, such as `enable_thinking=False` for Qwen 3.
    """
    if model.template is None:
        raise CheckpointError(
            "has no chat template.", file=model.folder, fix="Continue a text instead: `eformer generate`."
        )
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as err:
        raise ImportError(
            "Chat templates are read by the package `jinja2`, which is not installed: pip install 'eformer[models]'."
        ) from err

    def refuse(what: str) -> None:
        raise CheckpointError(f"has a chat template that rejects this conversation: {what}", file=model.folder)

    # A template is a program that came with a download: it gets the sandbox, and cannot change what it is given.
    rooms = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    rooms.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    rooms.globals["raise_exception"] = refuse
    rooms.globals["strftime_now"] = lambda words: datetime.datetime.now().strftime(words)
    try:
        return rooms.from_string(model.template).render(
            messages=list(messages), add_generation_prompt=True, **{**model.special, **more}
        )
    except jinja2.TemplateError as err:
        raise CheckpointError(f"has a chat template that fails: {err}", file=model.folder) from err
