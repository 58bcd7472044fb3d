"""Snapshots of objects inside functions, to compare a jitted call with plain Python."""

import collections
import copy
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from weft import nnx


def look(*args, **kwargs):
    """Returns the structure, as a number, and the values."""
    values, seen = [], {}
    text = str(_described((args, kwargs), values, seen))
    return zlib.crc32(text.encode()) >> 1, values


def work(*args, **kwargs):
    """Looks, doubles what is a variable or an array, and looks again."""
    before = look(*args, **kwargs)
    found = {}
    for _, x in nnx.iter_graph((args, kwargs)):
        found[id(x)] = x
    for x in found.values():
        if isinstance(x, nnx.Variable) and x.get_metadata().get("mutable", True):
            x.set_value(jax.tree.map(_doubled, x.get_value()))
        elif isinstance(x, nnx.Module) and not isinstance(x, list | dict):
            for name, value in list(vars(x).items()):
                # Not a number, which only a trace makes an array of.
                if isinstance(value, jax.Array | np.ndarray) and value.ndim:
                    setattr(x, name, _doubled(value))
    return before, look(*args, **kwargs)


def same(ours, plain):
    """Compares two looks."""
    ours, plain = jax.tree.leaves(ours), jax.tree.leaves(plain)
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def is_like_plain(jitted, *args, **kwargs):
    """Calls a jitted `work`, and compares all that is to be seen with what plain Python does."""
    plain_args, plain_kwargs = copy.deepcopy((args, kwargs))
    expected = work(*plain_args, **plain_kwargs)
    same(jitted(*args, **kwargs), expected)
    same(look(*args, **kwargs), look(*plain_args, **plain_kwargs))


def _doubled(x):
    return x * 2 if jnp.issubdtype(jnp.result_type(x), jnp.number) else x


def _described(x, values, seen):
    if isinstance(x, nnx.Variable | nnx.Pytree):
        if id(x) in seen:
            return "again", seen[id(x)]
        seen[id(x)] = len(seen)
    if isinstance(x, nnx.Variable):
        metadata = sorted(x.get_metadata().items())
        parts = [
            (k, v.__name__ if callable(v) else _described(v, values, seen)) for k, v in metadata
        ]
        held, tree = jax.tree.flatten(x.get_value())
        values.extend(held)
        kinds = [(jnp.shape(v), str(jnp.result_type(v))) for v in held]
        return type(x).__name__, parts, str(tree), kinds
    if isinstance(x, dict):
        # JAX sorts the keys of dicts that are not attributes.
        items = sorted(x.items()) if type(x) is dict else x.items()
        return type(x).__name__, [(str(k), _described(v, values, seen)) for k, v in items]
    if isinstance(x, list | tuple | set | collections.deque):
        # Equal sets, as one and its copy, may be gone through in different orders.
        items = sorted(x, key=repr) if isinstance(x, set) else x
        return type(x).__name__, [_described(v, values, seen) for v in items]
    if isinstance(x, int | float | jax.Array | np.ndarray):
        # Also a bool: in place of an array it is data, and a trace sees an array there.
        values.append(x)
        return jnp.shape(x), str(jnp.result_type(x))
    if x is None or isinstance(x, str | bytearray):
        return repr(x)
    if isinstance(x, type):
        return x.__name__
    if not isinstance(x, nnx.Pytree) and callable(x):
        return "calls", repr(x(3.0))
    items = sorted((k, v) for k, v in vars(x).items() if k != "_info")
    return type(x).__name__, [(k, _described(v, values, seen)) for k, v in items]
