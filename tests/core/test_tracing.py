import importlib.util

import jax
import jax.numpy as jnp
import pytest

from weft.core import tracing
from weft.core.tracing import check_trace_level, current_trace, with_room_in_trace
from weft.errors import JaxTransformError


@pytest.mark.parametrize(
    ("transform", "of_jax", "ours"),
    [
        (jax.jit, "jax.jit", "jit"),
        (jax.vmap, "jax.vmap", "vmap"),
        (jax.grad, "jax.grad", "grad"),
        (jax.checkpoint, "jax.checkpoint", "remat"),
    ],
)
def test_each_transformation_is_another_trace(transform, of_jax, ours):
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


def test_afterwards_it_is_the_one_from_before():
    before = current_trace()
    jax.jit(lambda x: x)(1.0)
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: 1 // 0)(1.0)
    assert current_trace() == before
    check_trace_level(before)


def test_what_is_called_with_room_in_a_trace_gets_all_that_it_is_given():
    def given(*args, **kwargs):
        return args, kwargs

    inside = []
    jax.jit(lambda x: inside.append(with_room_in_trace(given, 1, fn=2)) or x)(1.0)
    assert inside == [((1,), {"fn": 2})] == [with_room_in_trace(given, 1, fn=2)]


def test_a_trace_is_not_kept_alive():
    # checking_leaks is on: a tracer that outlives its trace would be an error here.
    kept = []
    jax.jit(lambda x: kept.append(current_trace()) or x)(1.0)
    assert kept[0] != current_trace()


def test_asked_for_the_first_time_inside_of_a_trace():
    spec = importlib.util.find_spec(tracing.__name__)
    unasked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unasked)
    inside = []
    jax.jit(lambda x: inside.append((unasked.current_trace(), unasked.is_tracing())) or x)(1.0)
    assert inside[0][1] and not unasked.is_tracing()
    assert inside[0][0] != unasked.current_trace() == current_trace()
