"""Runs a Linen program on Flax and on Weft, and compares what comes of it."""

import flax.core.meta
import flax.linen
import jax
import numpy as np
import pytest

import weft.core.meta
import weft.linen
from tests.keys import quick_key

KEY = quick_key(0)


def same(program, tolerance=1e-5):
    """Runs `program(nn)` on both.

    It returns results, which must be close, and variables, which must be the same bits; axis
    metadata must be the same in both.
    """
    of_flax, variables = program(flax.linen)
    of_weft, ours = program(weft.linen)
    same_tree(variables, ours)
    same_tree(of_flax, of_weft, tolerance)


def same_compiled(program, tolerance=1e-5):
    """Compares like `same`, in one JAX program: many times as fast for many distinct operations."""
    both = jax.jit(lambda: [program(nn) for nn in (flax.linen, weft.linen)])()
    same(dict(zip((flax.linen, weft.linen), both, strict=True)).get, tolerance)


def same_tree(of_flax, of_weft, tolerance=None):
    """Compares two trees: paths, metadata, dtypes, and values to the bit or to a tolerance."""
    theirs, ours = leaves(of_flax), leaves(of_weft)
    assert list(theirs) == list(ours)
    for path, (a, names) in theirs.items():
        b, our_names = ours[path]
        assert names == our_names, path
        if not hasattr(a, "dtype"):
            assert a == b, path
            continue
        assert a.dtype == b.dtype, path
        assert a.shape == b.shape, path
        if tolerance is None or jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            bits = (
                jax.random.key_data
                if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key)
                else np.asarray
            )
            np.testing.assert_array_equal(bits(a), bits(b), err_msg=path)
        else:
            as_floats = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (a, b))
            np.testing.assert_allclose(*as_floats, rtol=tolerance, atol=tolerance, err_msg=path)


def leaves(tree):
    """Returns each leaf by path, and the names of its axes if it is in a box."""
    boxes = (flax.core.meta.AxisMetadata, weft.core.meta.AxisMetadata)
    found = {}
    is_box = lambda x: isinstance(x, boxes)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        names = getattr(leaf, "names", None) if is_box(leaf) else None
        value = leaf.unbox() if is_box(leaf) else leaf
        found[jax.tree_util.keystr(path)] = value, (type(leaf).__name__, names) if names else None
    return found


def same_error(program):
    """Runs a program that raises on both; the classes have one name, or ours is theirs as well."""
    with pytest.raises(Exception) as theirs:
        program(flax.linen)
    with pytest.raises(Exception) as ours:
        program(weft.linen)
    of_flax, of_weft = type(theirs.value), type(ours.value)
    if of_flax.__module__ == "builtins":
        assert issubclass(of_weft, of_flax)
    else:
        assert of_flax.__name__ == of_weft.__name__
    return str(ours.value)


def named(cases):
    """Parametrizes over keyword arguments, with ids that show their names."""
    return pytest.mark.parametrize("kwargs", cases, ids=lambda k: ",".join(k) or "default")
