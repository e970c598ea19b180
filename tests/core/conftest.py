"""What tests of the core share."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit

from .toys import Block8, Doubled, dense, forget

WRAPPERS = {
    "eager": implicit,
    "jit outside": lambda f: jax.jit(implicit(f)),
    "jit inside": lambda f: implicit(jax.jit(f)),
}


@pytest.fixture(params=WRAPPERS.values(), ids=list(WRAPPERS))
def wrap(request):
    """The ways to turn dispatch on for a function."""
    return request.param


@pytest.fixture
def kind():
    """A class of its own for every test: handlers are registered for good."""

    @dataclasses.dataclass
    class Fresh(Doubled):
        pass

    return Fresh


@pytest.fixture
def fresh():
    forget()


@pytest.fixture(scope="module")
def quick_compiles():
    """For many small programs that run once: what matters is their value, not their speed."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def q(key):
    return Block8.quantize(jax.random.normal(key, (16, 8)))


@pytest.fixture
def w(q):
    return jnp.asarray(dense(q))


@pytest.fixture
def x(key):
    return jax.random.normal(jax.random.fold_in(key, 1), (4, 16))
