"""Blocks under threads, coroutines and generators: what one does is never seen by another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import pytest

from eformer._jax import traces
from eformer.jaximus import implicit, materialization_policy

from .toys import Block8, Plain, assert_same, dense


@pytest.fixture
def q():
    return Block8.quantize(jnp.arange(32.0).reshape(8, 4))


def dispatching(q) -> bool:
    """Does a jnp function dispatch here? Outside a scope it makes `q` dense."""
    return hasattr(jnp.multiply(q, 2.0), "materialize")


def test_the_probe_tells_inside_from_outside(q):
    assert not dispatching(q)
    with implicit:
        assert dispatching(q)
    assert not dispatching(q)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_block_is_local_to_its_thread(q):
    seen = []
    inside, done = threading.Event(), threading.Event()

    def other():
        inside.wait(600)
        seen.append(dispatching(q))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with implicit:
        inside.set()
        assert done.wait(600)
        assert dispatching(q)
    thread.join()
    assert seen == [False]


def test_many_threads(q):
    xs = [jnp.full((2, 8), float(i)) for i in range(8)]
    barrier = threading.Barrier(8)
    compiled = jax.jit(lambda x, w: x @ w)

    def work(i):
        barrier.wait(600)
        for _ in range(4):
            with implicit:
                a = jnp.dot(xs[i], q)
                b = jax.jit(jnp.dot)(xs[i], q)
            c = implicit(compiled)(xs[i], q)
            d = xs[i] @ q
        return a, b, c, d

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(8)))
    for x, outs in zip(xs, results, strict=True):
        for out in outs:
            assert_same(out, x @ dense(q))


def test_policies_are_local_to_a_thread():
    q = Plain(jnp.ones(3), jnp.ones(3))

    with materialization_policy("error"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert_same(pool.submit(lambda: implicit(jnp.sin)(q)).result(), jnp.sin(jnp.ones(3)))


# -- asyncio -----------------------------------------------------------------------------------------------------------


def test_a_task_that_leaves_its_block_before_the_other(q):
    async def task(before, after):
        await asyncio.sleep(before)
        with implicit:
            out = jnp.dot(jnp.ones((2, 8)), q)
            await asyncio.sleep(after)
            again = jnp.dot(jnp.ones((2, 8)), q)
        return out, again

    async def main():
        # entering a, b, c and leaving b, a, c
        return await asyncio.gather(task(0, 0.02), task(0.005, 0.005), task(0.01, 0.04))

    for pair in asyncio.run(main()):
        for out in pair:
            assert_same(out, jnp.ones((2, 8)) @ dense(q))
    assert not dispatching(q)


def test_after_interleaved_tasks_the_thread_is_clean(q):
    async def task(i):
        for _ in range(3):
            with implicit:
                await asyncio.sleep(0.001 * (i % 3))
                if i == 4:
                    raise KeyError(i)

    async def main():
        return await asyncio.gather(*(task(i) for i in range(8)), return_exceptions=True)

    results = asyncio.run(main())
    assert [type(r) for r in results if r is not None] == [KeyError]
    assert not dispatching(q)
    with implicit:
        assert dispatching(q)
    assert not dispatching(q)


def test_a_task_outside_any_block_is_not_affected_by_one_inside(q):
    seen = []

    async def inside():
        with implicit:
            await asyncio.sleep(0.02)

    async def outside():
        await asyncio.sleep(0.005)
        seen.append(dispatching(q))

    async def main():
        await asyncio.gather(inside(), outside())

    asyncio.run(main())
    assert seen == [False]


def test_a_cancelled_task_cleans_up(q):
    async def forever():
        with implicit:
            await asyncio.sleep(60)

    async def main():
        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not dispatching(q)


# -- coroutine and generator functions ---------------------------------------------------------------------------------


def test_decorated_coroutines(q):
    @implicit
    async def f(x, w):
        """Waits in between."""
        y = jnp.dot(x, w)
        await asyncio.sleep(0)
        assert dispatching(w)
        return y, w * 2.0

    async def main():
        waiting = asyncio.gather(*(f(jnp.ones((1, 8)) * i, q) for i in range(4)))
        await asyncio.sleep(0)
        assert not dispatching(q)
        return await waiting

    assert asyncio.iscoroutinefunction(f)
    assert f.__doc__ == "Waits in between."
    for i, (y, doubled) in enumerate(asyncio.run(main())):
        assert_same(y, i * (jnp.ones((1, 8)) @ dense(q)))
        assert isinstance(doubled, Block8)


def test_exceptions_pass_through_coroutines(q):
    @implicit
    async def f():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert dispatching(q)
            raise

    async def main():
        task = asyncio.create_task(f())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert not dispatching(q)


def test_decorated_generators(q):
    @implicit
    def f(x, w):
        got = yield jnp.dot(x, w)
        try:
            yield jnp.dot(got, w)
        except KeyError:
            yield w * 2.0
        return w

    x = jnp.ones((1, 8))
    steps = f(x, q)
    assert_same(next(steps), x @ dense(q))
    assert not dispatching(q)
    assert_same(steps.send(2 * x), 2 * x @ dense(q))
    assert isinstance(steps.throw(KeyError()), Block8)
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert isinstance(stop.value.value, Block8)


def test_a_generator_closed_early_runs_its_cleanup(q):
    cleaned = []

    @implicit
    def f():
        try:
            yield 1
        finally:
            cleaned.append(dispatching(q))

    steps = f()
    next(steps)
    steps.close()
    assert cleaned == [True]


def test_a_block_inside_a_generator(q):
    def f():
        with implicit:
            yield jnp.dot(jnp.ones((1, 8)), q)
            yield jnp.dot(jnp.ones((1, 8)), q)

    first, second = f(), f()
    outs = [next(first), next(second), next(second), next(first)]
    first.close()
    second.close()
    for out in outs:
        assert_same(out, jnp.ones((1, 8)) @ dense(q))
    assert not dispatching(q)


def test_a_block_inside_an_async_generator(q):
    async def produce():
        with implicit:
            for _ in range(3):
                yield jnp.dot(jnp.ones((1, 8)), q)
                await asyncio.sleep(0)

    async def main():
        return [y async for y in produce()]

    assert len(asyncio.run(main())) == 3
    assert not dispatching(q)


def test_decorated_async_generators(q):
    @implicit
    async def produce(w):
        for _ in range(2):
            yield jnp.dot(jnp.ones((1, 8)), w)
            await asyncio.sleep(0)
            assert dispatching(q)

    async def main():
        return [y async for y in produce(q)]

    for y in asyncio.run(main()):
        assert_same(y, jnp.ones((1, 8)) @ dense(q))


def test_a_block_costs_no_entry_in_the_caches_of_jax():
    f, x = jax.jit(lambda x: x + 1), jnp.ones(2)
    with implicit:
        f(x)
    before = f._cache_size()
    for _ in range(5):
        with implicit:
            f(x)
            with implicit:
                f(x)
    assert f._cache_size() == before


def test_requests_that_overlap_leave_nothing_behind():
    """Each task enters its block before the task before it leaves."""
    depths = []

    async def request(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with implicit:
            entered.set()
            await leave.wait()

    async def server() -> None:
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(40)]
        tasks: list[asyncio.Task[None]] = []
        for number, (entered, _) in enumerate(events):
            tasks.append(asyncio.create_task(request(*events[number])))
            await entered.wait()
            if number:
                events[number - 1][1].set()
                await tasks[number - 1]
            depth, trace = 0, traces.current_trace()
            while trace is not traces.eval_trace:
                depth, trace = depth + 1, trace.parent_trace
            depths.append(depth)
        events[-1][1].set()
        await tasks[-1]

    asyncio.run(server())
    assert set(depths) == {1}
    assert traces.current_trace() is traces.eval_trace
