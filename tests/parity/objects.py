"""Runs a program on NNX of Flax and of Weft, and compares what comes of it."""

import inspect
from collections.abc import Mapping
from importlib.metadata import version

import flax.nnx
import jax
import numpy as np
import pytest
from jax.core import Tracer

import weft.nnx
from tests.keys import draw, quick_key

# Flax keeps these in addition to the given metadata.
OF_FLAX = ("eager_sharding", "hijax", "ref")


# Arguments of attention: Flax does not let choose the first, and has the second since 0.12.12.
ADDED = ("implementation", "input_positions")

# Weft agrees with Flax 0.12.8. JAX 0.12, on Python 3.12 and later, needs a later one.
IS_LATER_FLAX = version("flax") != "0.12.8"


def same(program, tolerance=1e-5):
    """Runs `program(nnx)` on both.

    It returns results, which must be close and have the same dtypes, and objects, whose variables
    must have the same paths, classes, metadata and bits, and whose attributes the same values.
    """
    of_flax, theirs = program(flax.nnx)
    of_weft, ours = program(weft.nnx)
    assert described(theirs) == described(ours)
    same_arrays(of_flax, of_weft, tolerance)


def same_compiled(program, tolerance=1e-5):
    """Compares like `same`, in one JAX program: faster for many distinct operations."""
    structures = []

    @jax.jit
    def both():
        arrays = []
        for nnx in (flax.nnx, weft.nnx):
            results, objects = program(nnx)
            leaves, structure = jax.tree.flatten(described(objects))
            traced = [isinstance(x, Tracer) for x in leaves]
            rest = [None if t else x for x, t in zip(leaves, traced, strict=True)]
            structures.append((structure, traced, rest))
            arrays.append((results, [x for x, t in zip(leaves, traced, strict=True) if t]))
        return arrays

    (of_flax, theirs), (of_weft, ours) = both()
    assert structures[0] == structures[1]
    assert described(theirs) == described(ours)
    same_arrays(of_flax, of_weft, tolerance)


def same_arrays(of_flax, of_weft, tolerance=1e-5):
    """Compares two trees of arrays: structure, dtypes, shapes, and values to a tolerance."""
    theirs, structure = jax.tree.flatten(of_flax)
    ours, our_structure = jax.tree.flatten(of_weft)
    assert structure == our_structure
    for a, b in zip(theirs, ours, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        as_floats = (np.asarray(x, complex if np.iscomplexobj(x) else float) for x in (a, b))
        np.testing.assert_allclose(*as_floats, rtol=tolerance, atol=tolerance)


def described(x):
    """Returns an object in plain Python: variables with class, metadata and bits, attributes by
    name. Arrays of a program that is being traced are left as they are.
    """
    if isinstance(x, flax.nnx.Variable | weft.nnx.Variable):
        metadata = {k: described(v) for k, v in x.get_metadata().items() if k not in OF_FLAX}
        return type(x).__name__, metadata, described(x.get_raw_value())
    if isinstance(x, flax.nnx.Pytree | weft.nnx.Pytree):
        attributes = {
            k: described(v) for k, v in vars(x).items() if not k.startswith("_") and k not in ADDED
        }
        return type(x).__name__, dict(sorted(attributes.items()))
    if isinstance(x, Tracer):
        return x
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "key", np.asarray(jax.random.key_data(x)).tolist()
    if isinstance(x, jax.Array | np.ndarray):
        return str(x.dtype), x.shape, np.asarray(x).tobytes()
    if isinstance(x, flax.nnx.State | weft.nnx.State):
        return {k: described(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [described(v) for v in x]
    if isinstance(x, type):
        return x.__name__
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    return str(x) if type(x).__name__ == "FrozenDict" else x


def same_error(program):
    """Runs a program that raises on both; what catches the error of Flax catches that of Weft."""
    with pytest.raises(Exception) as theirs:
        program(flax.nnx)
    with pytest.raises(Exception) as ours:
        program(weft.nnx)
    known = next(c for c in type(theirs.value).__mro__ if c.__module__ == "builtins")
    assert issubclass(type(ours.value), known)
    return str(ours.value)


def same_signature(name, method="__init__"):
    """Compares parameters: names, kinds and defaults, and the order of positional ones."""

    def parameters(nnx):
        signature = inspect.signature(getattr(getattr(nnx, name), method))
        found = [
            (p.name, p.kind, _default(p.default))
            for p in signature.parameters.values()
            if p.name not in ADDED
        ]
        return sorted(found, key=lambda p: p[0] if p[1] is inspect.Parameter.KEYWORD_ONLY else "")

    assert parameters(flax.nnx) == parameters(weft.nnx)


def _default(x):
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, bool | int | float | str | tuple | None):
        return x
    return x.__name__ if isinstance(x, type) else type(x).__name__


def named(cases):
    """Parametrizes over keyword arguments, with ids that show their names."""
    return pytest.mark.parametrize("kwargs", cases, ids=lambda k: ",".join(k) or "default")


X = draw(1, 2, 3, 4, 5)


def applied(name, *args, x=X, call=(), **kwargs):
    """Returns a program that makes a layer and applies it, which compares the streams too."""

    def program(nnx):
        rngs = nnx.Rngs(quick_key(0), params=quick_key(7))
        layer = getattr(nnx, name)(*args, rngs=rngs, **kwargs)
        return layer(x, *call), [layer, rngs]

    return program


def twice(function):
    """Returns a function in place of one of JAX's, which doubles what it gives."""

    def call(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return call


def in_half(args, /, *, dtype=None, inexact=True):
    """Returns a function in place of `promote_dtype`."""
    assert dtype is None and inexact
    return tuple(None if x is None else jax.numpy.asarray(x, "bfloat16") for x in args)


def tolerance(kwargs):
    """Returns how close the results of a layer have to be, by the dtypes that it is given."""
    rough = {"dtype", "param_dtype", "promote_dtype", "preferred_element_type"}
    return 2e-2 if kwargs.keys() & rough else 1e-5


normal = jax.nn.initializers.normal(1.0)
# The options of all layers with a kernel and a bias.
COMMON = [
    {},
    {"dtype": "float16"},
    {"param_dtype": "bfloat16"},
    {"param_dtype": "bfloat16", "dtype": "float32"},
    {"param_dtype": "complex64"},
    {
        "precision": ("default", "highest"),
        "kernel_init": jax.nn.initializers.ones,
        "bias_init": normal,
    },
    {"promote_dtype": in_half},
    {"preferred_element_type": "bfloat16"},
    {
        "precision": "highest",
        "kernel_metadata": {"out_sharding": ("a", "b"), "eager_sharding": False},
    },
    {"kernel_metadata": {"tag": "k"}, "bias_metadata": {"tag": "b", "sizes": (1, 2)}},
]
