import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core.partial_eval import partial_eval, partial_eval_or_shapes
from weft.core.tracing import check_trace_level
from weft.errors import JaxTransformError, LazyInitError
from weft.lifting import traces
from weft.lifting.traces import current_trace

SHAPE = jax.ShapeDtypeStruct((2, 3), "float32")


def test_shape_only_results_are_computed():
    def fn(x, y):
        return {"ones": jnp.ones(x.shape, x.dtype), "twice": 2 * y}

    result = partial_eval(fn, SHAPE, np.arange(2.0, dtype="float32"))
    assert jax.tree.map(lambda v: (v.shape, v.dtype.name), result) == {
        "ones": ((2, 3), "float32"),
        "twice": ((2,), "float32"),
    }
    assert result["twice"].tolist() == [0.0, 2.0]


def test_result_that_needs_a_value_is_named():
    def fn(x):
        return {"a": {"b": jnp.zeros(3), "c": x.sum(), "d": x + 1}}

    with pytest.raises(
        LazyInitError, match="lazy_init cannot compute a/c: its initial value depend"
    ):
        partial_eval(fn, SHAPE)


def test_unused_operations_are_skipped():
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), "float32")

    def fn(x, y):
        return y + 1 + 0 * (jnp.ones_like(x) @ x).ndim

    assert partial_eval(fn, huge, jnp.float32(1)) == 2


def test_unknown_result():
    with pytest.raises(
        LazyInitError, match="1: its initial value depends on the value of an input"
    ):
        partial_eval(lambda x: (jnp.ones(2), x), SHAPE)


def test_unknown_values_have_shapes():
    result = partial_eval_or_shapes(
        lambda x, y: {"a": x.sum(), "b": (y + 1, 2), "x": x}, SHAPE, np.ones(3)
    )
    assert result["b"][0].tolist() == [2, 2, 2] and result["b"][1] == 2
    assert result["a"] == jax.ShapeDtypeStruct((), "float32") and result["x"] == SHAPE


@pytest.mark.parametrize(
    ("transform", "of_jax", "ours"),
    [
        (jax.jit, "jax.jit", "jit"),
        (jax.vmap, "jax.vmap", "vmap"),
        (jax.grad, "jax.grad", "grad"),
        (jax.checkpoint, "jax.checkpoint", "remat"),
    ],
)
def test_transformations_are_separate_traces(transform, of_jax, ours):
    outside, seen = current_trace(), []

    def f(x):
        seen.append(current_trace() == outside)
        check_trace_level(current_trace())
        message = rf"A scope is used in '/' inside of {of_jax}, which .*`nn.{ours}` of weft.linen"
        with pytest.raises(JaxTransformError, match=message):
            check_trace_level(outside)
        return x * 1.0

    x = jnp.ones(2) if transform is jax.vmap else 1.0
    transform(f)(x)
    assert seen == [False]


def test_first_use_inside_a_trace():
    spec = importlib.util.find_spec(traces.__name__)
    unasked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unasked)
    inside = []
    jax.jit(lambda x: inside.append((unasked.current_trace(), unasked.is_tracing())) or x)(1.0)
    assert inside[0][1] and not unasked.is_tracing()
    assert inside[0][0] != unasked.current_trace() == current_trace()
