"""What does a model of NNX layers cost in Python: traced, called eagerly, made abstractly?"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._nnx_models import (
    mlp_of,
    pure,
    raw_block_init,
    raw_mlp,
    stacked,
    unrolled_of,
)
from benchmarks._peers import libraries
from benchmarks.harness import Row, calls, ratios, row
from benchmarks.tracing import DIM, LAYERS, raw_block, raw_scanned, raw_unrolled

X = jnp.ones((2, 8, DIM))


def _row(question, a, b, at_most, *, pairs=15, times=1) -> Row:
    pairs = pairs if at_most else 5  # of Flax one wants to know the size

    def many(fn):
        for _ in range(times):
            fn()

    measured = ratios(
        lambda: many(a), lambda: many(b), pairs=pairs, clock=time.thread_time, collect=times == 1
    )
    note = f"{calls(a, 1):.0f} against {calls(b, 1):.0f} Python calls"
    return row(question, measured, at_most=at_most, note=note)


def _traced(jit, fn, *args):
    """Traces a function under `jit`; it is made anew, so that it is found in no cache."""
    new = object()

    def called(*args):
        assert new is not None
        return fn(*args)

    return jit(called).trace(*args)


def _compared(question, nnx, model, apply, raw, at_most, cold=False) -> Row:
    params = pure(nnx, model)
    np.testing.assert_allclose(apply(model, X), raw(params, X), rtol=1e-4, atol=1e-5)

    def trace(jit, fn, *args):
        if cold:
            jax.clear_caches()
        _traced(jit, fn, *args)

    return _row(
        question,
        lambda: trace(nnx.jit, apply, model, X),
        lambda: trace(jax.jit, raw, params, X),
        at_most,
    )


def _unrolled(library, nnx, is_weft) -> list[Row]:
    unrolled = unrolled_of(nnx)
    return [
        _compared(
            f"trace {n} layers, {library} / raw",
            nnx,
            unrolled(n, rngs=nnx.Rngs(0)),
            lambda model, x: model(x),
            raw_unrolled(n, raw_block),
            1.2 if is_weft else None,
        )
        for n in (12, 24, 48)
    ]


def _scanned(library, nnx, is_weft) -> Row:
    def apply(model, x):
        body = lambda x, layer: layer(x)  # noqa: E731
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)

    return _compared(
        f"trace a scan of {LAYERS} layers, {library} / raw",
        nnx,
        stacked(nnx, LAYERS),
        apply,
        raw_scanned(raw_block),
        1.15 if is_weft else None,
        cold=True,
    )


def _abstract(library, nnx, is_weft) -> list[Row]:
    unrolled = unrolled_of(nnx)

    def raw(n):
        key = jax.random.key(0)
        return {f"layer{i}": raw_block_init(jax.random.fold_in(key, i)) for i in range(n)}

    def shapes(n):
        return nnx.eval_shape(lambda: unrolled(n, rngs=nnx.Rngs(0)))

    of_raw = jax.eval_shape(functools.partial(raw, 2))
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), pure(nnx, shapes(2)), of_raw
    )
    assert all(jax.tree.leaves(same)), same
    rows = [
        _row(
            f"abstract init of {n} layers, {library} / raw",
            lambda n=n: shapes(n),
            lambda n=n: jax.eval_shape(functools.partial(raw, n)),
            3.0 if is_weft else None,
            pairs=7,
        )
        for n in ((6, 24, 96) if is_weft else (6, 24))
    ]
    depth = _row(
        f"abstract init of 24 / 6 layers, {library}",
        lambda: shapes(24),
        lambda: shapes(6),
        4.4 if is_weft else None,
    )
    return [*rows, depth]


def _eager(library, nnx, is_weft) -> Row:
    model, x = mlp_of(nnx)(rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    params = pure(nnx, model)
    np.testing.assert_allclose(model(x), raw_mlp(params, x), rtol=1e-5)
    return _row(
        f"eager forward of an MLP of 8 layers of width 8, {library} / raw",
        lambda: model(x).block_until_ready(),
        lambda: raw_mlp(params, x).block_until_ready(),
        4.0 if is_weft else None,
        pairs=50,
        times=5,
    )


def run() -> list[Row]:
    """A decoder unrolled and scanned, made abstractly; an MLP eagerly."""
    rows = []
    for library, nnx in libraries().items():
        of = library, nnx, library.startswith("Weft")
        rows += [*_unrolled(*of), _scanned(*of), *_abstract(*of), _eager(*of)]
    return rows
