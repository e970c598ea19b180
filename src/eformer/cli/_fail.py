"""Exit statuses, and the errors that end a command with one line for the user."""

from __future__ import annotations

from eformer.errors import CommandError as Failure
from eformer.errors import CommandUsageError as WrongUse

__all__ = ["FAILED", "OK", "WRONG_USE", "Failure", "WrongUse"]

OK, FAILED, WRONG_USE = 0, Failure.status, WrongUse.status
