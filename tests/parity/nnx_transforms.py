"""Runs a program with transformations on NNX of Flax and of Weft, in each of the semantics."""

import functools
import itertools
import types
from collections.abc import Mapping

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.nnx
from tests.keys import draw

GRAPH: dict[str, bool] = {}
VALUES = {"graph_updates": False}
TREE = {"graph": False}
_NAMES = {id(GRAPH): "graph", id(VALUES): "values", id(TREE): "tree"}
_OF_FLAX = ("eager_sharding", "hijax", "ref")


class Programs:
    """The programs of a file, each with the semantics in which both libraries have it."""

    def __init__(self):
        self._cases, self._turns = [], itertools.count()

    def __call__(self, *modes):
        """Marks a program, which takes the library and the options that say the semantics.

        Without `modes`, it runs on graphs, and programs take turns with the other two.
        """

        def add(program):
            others = VALUES, TREE
            for mode in modes or (GRAPH, others[next(self._turns) % 2]):
                name = f"{program.__name__}-{_NAMES[id(mode)]}"
                self._cases.append(pytest.param(program, mode, id=name))
            return program

        return add

    @property
    def each(self):
        return pytest.mark.parametrize("program,mode", self._cases)


def same(program, mode):
    """Runs a program on both; the results must be equal.

    Values are compared to a tolerance, keys bit for bit; variables by class and metadata, objects
    by class and attributes, with what they share.
    """
    _compare(described(program(flax.nnx, **mode)), described(program(weft.nnx, **mode)), "result")


def same_error(program, mode):
    """Runs a program that raises on both: what catches Flax's error catches Weft's."""
    with pytest.raises(Exception) as theirs:
        program(flax.nnx, **mode)
    with pytest.raises(Exception) as ours:
        program(weft.nnx, **mode)
    known = next(c for c in type(theirs.value).__mro__ if c.__module__ == "builtins")
    assert issubclass(type(ours.value), known), (theirs.value, ours.value)


def described(x):
    """Returns a result in plain Python: one object at two places is named by the first of them."""
    return _described(x, {}, "")


def _described(x, seen, path):
    is_variable = isinstance(x, flax.nnx.Variable | weft.nnx.Variable)
    if is_variable or isinstance(x, flax.nnx.Pytree | weft.nnx.Pytree):
        if id(x) in seen:
            return f"the one at {seen[id(x)][0]}"
        seen[id(x)] = path, x
    if is_variable:
        metadata = {k: v for k, v in x.get_metadata().items() if k not in _OF_FLAX}
        value = _described(x.get_raw_value(), seen, path)
        return type(x).__name__, _described(metadata, seen, path), value
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "key", np.asarray(jax.random.key_data(x)).tolist()
    if isinstance(x, jax.ShapeDtypeStruct):
        return "shape", x.shape, str(x.dtype)
    if isinstance(x, bool | int | float | str | type(None) | jax.Array | np.ndarray):
        return x
    if isinstance(x, type):
        return x.__name__
    if isinstance(x, flax.nnx.Pytree | weft.nnx.Pytree) and not isinstance(x, Mapping | list):
        items = sorted((k, v) for k, v in vars(x).items() if not k.startswith("_"))
        parts = {k: _described(v, seen, f"{path}.{k}") for k, v in items}
        return type(x).__name__, parts
    if isinstance(x, Mapping):
        return {k: _described(v, seen, f"{path}.{k}") for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_described(v, seen, f"{path}.{i}") for i, v in enumerate(x)]
    return getattr(x, "__name__", str(x))


def _compare(theirs, ours, path):
    if isinstance(theirs, list | tuple):
        assert type(theirs) is type(ours) and len(theirs) == len(ours), (path, theirs, ours)
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            _compare(a, b, f"{path}[{i}]")
    elif isinstance(theirs, dict):
        assert theirs.keys() == ours.keys(), (path, theirs.keys(), ours.keys())
        for key in theirs:
            _compare(theirs[key], ours[key], f"{path}.{key}")
    elif isinstance(theirs, jax.Array | np.ndarray):
        kinds = [(x.dtype, x.shape) for x in map(np.asarray, (theirs, ours))]
        assert kinds[0] == kinds[1], (path, kinds)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=path)
    else:
        assert type(theirs) is type(ours) and theirs == ours, (path, theirs, ours)


@functools.cache
def models(nnx):
    """Models written with the layers of a library."""

    class Count(nnx.Variable):
        pass

    class Pair(nnx.Module):
        """A parameter and a counter."""

        def __init__(self, w=2.0, n=0.0):
            self.w = nnx.Param(jnp.asarray(w))
            self.n = Count(jnp.asarray(n))

        def __call__(self, x):
            self.n[...] += 1
            return x * self.w

    class Block(nnx.Module):
        """Layers with parameters, statistics and random numbers."""

        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jax.nn.gelu(self.norm(self.linear(x))))

    class Holder(nnx.Module):
        """Has others as attributes."""

        def __init__(self, **kwargs):
            for name, value in kwargs.items():
                setattr(self, name, value)

    return types.SimpleNamespace(Count=Count, Pair=Pair, Block=Block, Holder=Holder)


X = draw(1, 4, 3)
