"""Ends of a command that are nobody's bug: each is one line for the user and an exit status."""

from __future__ import annotations

OK, FAILED, WRONG_USE = 0, 1, 2


class Failure(Exception):
    """The command cannot do what was asked; the text says why and what to do."""

    status = FAILED


class WrongUse(Failure):
    """The arguments make no sense together."""

    status = WRONG_USE
