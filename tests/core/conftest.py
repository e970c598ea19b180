"""What tests of handlers share."""

import dataclasses

import pytest

from .toys import Doubled


@pytest.fixture
def kind():
    """A class of its own for every test: handlers are registered for good."""

    @dataclasses.dataclass
    class Fresh(Doubled):
        pass

    return Fresh
