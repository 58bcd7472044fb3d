"""Records which products of JAX a program calls, as a library sees them that replaces them.

Libraries of quantization replace the code of `jax.lax.dot_general` and the like while a model runs,
so they see each call, also of a reference that was taken before.
"""

import contextlib
import types

import jax
import jax.numpy as jnp

PRODUCTS = {
    "dot_general": jax.lax.dot_general,
    "conv_general_dilated": jax.lax.conv_general_dilated,
    "einsum": jnp.einsum,
}
_originals = {}
_calls = []


def _dot_general(*args, **kwargs):
    from tests.parity import products

    return products.call("dot_general", args, kwargs)


def _conv_general_dilated(*args, **kwargs):
    from tests.parity import products

    return products.call("conv_general_dilated", args, kwargs)


def _einsum(*args, **kwargs):
    from tests.parity import products

    return products.call("einsum", args, kwargs)


def call(name, args, kwargs):
    of_another = _calls and _calls[-1] == "runs"
    if not of_another:
        operands = [x for x in args[:3] if isinstance(x, jax.Array)]
        _calls.extend([(name, [(x.shape, x.dtype.name) for x in operands]), "runs"])
    try:
        return _originals[name](*args, **kwargs)
    finally:
        if not of_another:
            _calls.pop()


@contextlib.contextmanager
def recorded():
    """Enters a context that records products with the shapes and dtypes of their operands."""
    _calls.clear()
    for name, fn in PRODUCTS.items():
        copy = types.FunctionType(fn.__code__, fn.__globals__, name, fn.__defaults__)
        copy.__kwdefaults__ = fn.__kwdefaults__
        _originals[name] = copy
        fn.__code__ = globals()[f"_{name}"].__code__
    try:
        yield _calls
    finally:
        for name, fn in PRODUCTS.items():
            fn.__code__ = _originals[name].__code__
