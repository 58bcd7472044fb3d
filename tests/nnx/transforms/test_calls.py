"""Names of user functions in compiled code, for all transformations."""

import functools
import threading

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import CallMismatchError, CapturedObjectError, StateFilterError
from weft.errors import TransformArgumentError as ArgumentError
from weft.nnx.versions import current_call


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))

    def double(self, x):
        return 2 * self.w * x


def test_open_call_is_known_by_its_transformation_and_function():
    seen = []

    def inner(m):
        seen.append(current_call().title)

    def outer(m):
        seen.append(current_call().title)
        nnx.remat(inner)(m)
        seen.append(current_call().title)

    nnx.vmap(outer, in_axes=None, axis_size=2)(Pair())
    assert seen == ["nnx.vmap(outer)", "nnx.remat(inner)", "nnx.vmap(outer)"]
    assert current_call() is None


def test_no_call_is_open_after_an_exception_or_in_another_thread():
    seen = []

    def f(m):
        thread = threading.Thread(target=lambda: seen.append(current_call()))
        thread.start()
        thread.join()
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.grad(f)(Pair())
    assert seen == [None]
    assert current_call() is None


def test_functions_without_a_name_are_shown_by_their_class():
    seen = []

    class Callable:
        def __call__(self, m):
            seen.append(current_call().title)

    nnx.remat(Callable())(Pair())
    nnx.remat(functools.partial(Callable()))(Pair())
    assert seen == ["nnx.remat(Callable)", "nnx.remat(partial)"]


FROM_OUTSIDE = Pair()


def takes_both(m, *, other=None, **more):
    return FROM_OUTSIDE


def missing(m, others=(), **kwargs):
    m.extra = nnx.Cache(jnp.ones(2))


def test_errors_use_parameter_names():
    params = nnx.StateAxes({nnx.Param: 0})
    pairs = [Pair(jnp.ones(2), jnp.ones(2)) for _ in range(2)]
    with pytest.raises(
        StateFilterError, match=r"in_axes has no filter for m\.n, a BatchStat; its fil"
    ):
        nnx.vmap(missing, in_axes=(params, 0))(*pairs)
    with pytest.raises(StateFilterError, match=r"no filter for others\[0\]\['k'\]\.n, a BatchStat"):
        nnx.vmap(missing, in_axes=(0, params))(pairs[0], [{"k": pairs[1]}])
    with pytest.raises(StateFilterError, match=r"no filter for args\[1\]\.n, a BatchStat"):
        nnx.vmap(lambda *pairs: None, in_axes=(0, params))(*pairs)
    only_stats = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: 0})
    with pytest.raises(StateFilterError, match=r"in_axes has no filter for m\.extra, a Cache"):
        nnx.vmap(missing, in_axes=(only_stats,))(pairs[0])
    with pytest.raises(StateFilterError, match=r"the result\['y'\]\[0\]\.n, .* are Param; add"):
        nnx.vmap(lambda x: {"y": [Pair(x, x)]}, out_axes=params)(jnp.ones(2))


def test_captured_object_is_named_with_its_origin():
    with pytest.raises(CapturedObjectError, match=r"the result is a Pair that was created outside"):
        nnx.remat(takes_both)(Pair(), other=Pair(), more=Pair())
    owner = nnx.Dict(part=Pair())
    with pytest.raises(CapturedObjectError, match=r"It was made at \S+test_calls.py:"):
        nnx.remat(lambda x: owner.part)(1.0)


def test_error_names_the_transform_line():
    def f(x):
        return FROM_OUTSIDE

    mapped = nnx.vmap(f, in_axes=0)

    with pytest.raises(CapturedObjectError, match=r"test_calls\.py:\d+: mapped = nnx\.vmap\(f, in"):
        mapped(jnp.ones(3))

    @nnx.jit
    @nnx.remat(prevent_cse=False)
    def g(x):
        return FROM_OUTSIDE

    with pytest.raises(CapturedObjectError, match=r"test_calls\.py:\d+: @nnx\.remat\(prevent_cse="):
        g(1.0)
    with pytest.raises(CapturedObjectError, match=r"test_calls\.py:\d+: nnx\.cond\(True, f, f, 1"):
        nnx.cond(True, f, f, 1.0)


def test_bound_methods_cannot_be_transformed():
    message = r"nnx\.{}: double is a bound method of a Pair, .* transform Pair\.double and pass the"
    for name in (
        "vmap",
        "pmap",
        "scan",
        "remat",
        "grad",
        "value_and_grad",
        "checkify",
        "make_jaxpr",
    ):
        with pytest.raises(ArgumentError, match=message.format(name)):
            getattr(nnx, name)(Pair().double)
    with pytest.raises(ArgumentError, match=message.format("eval_shape")):
        nnx.eval_shape(Pair().double, 1.0)
    with pytest.raises(ArgumentError, match=message.format("custom_vjp")):
        nnx.custom_vjp(Pair().double)


def test_keyword_arguments_without_position_are_rejected():
    def f(x, *, scale):
        return x * scale

    for transform in (nnx.vmap, nnx.pmap, nnx.scan):
        with pytest.raises(CallMismatchError, match=r"scale can only be passed by name, but roles"):
            transform(f)(jnp.ones(1), scale=2.0)
    assert float(nnx.remat(f)(1.0, scale=2.0)) == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        nnx.remat(f)(1.0, scale=2.0, other=1)


class Model(nnx.Module):
    def __init__(self, *shape):
        self.w = nnx.Param(jnp.ones(shape))


def user_step(model, x):
    return jnp.sum(model.w * x)


def user_body(x, model):
    return x * model.w.sum(), x


def user_loop(i, x):
    return x + 1.0


def ruled():
    f = nnx.custom_vjp(user_step)
    f.defvjp(lambda model, x: (f(model, x), x), lambda x, g: (nnx.state(Model(2)), x))
    return lambda: f(Model(2), jnp.ones(2))


X = jnp.ones(2)
RUNS = {
    "jit": (lambda: nnx.jit(user_step)(Model(2), X), "user_step"),
    "jit of a partial": (lambda: nnx.jit_partial(user_step, Model(2))(X), "user_step"),
    "remat": (lambda: nnx.remat(user_step)(Model(2), X), "user_step"),
    "custom_vjp": (ruled(), "user_step"),
    "pmap": (lambda: nnx.pmap(user_step)(Model(1, 2), X[None]), "user_step"),
    "cond": (lambda: nnx.cond(X[0] > 0, user_step, user_step, Model(2), X), "user_step"),
    "scan": (lambda: nnx.scan(user_body)(jnp.array(1.0), Model(2)), "user_body"),
    "fori_loop": (lambda: nnx.fori_loop(0, 2, user_loop, 1.0), "user_loop"),
}
INTERNAL = ("pure", "call", "run", "checked", "body", "of_values", "of_leaves", "lambda")


def names_in(run):
    """Returns the names of all functions that are traced inside of a run."""
    found = set()

    def look(jaxpr):
        found.add(jaxpr.debug_info.func_name)
        for equation in jaxpr.eqns:
            name = equation.params.get("name")
            found.update([name] if isinstance(name, str) else [])
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    look(inner)

    def outermost():
        return run()

    look(jax.make_jaxpr(outermost)().jaxpr)
    return found - {"outermost"}


@pytest.mark.parametrize(("run", "name"), RUNS.values(), ids=RUNS)
def test_compiled_name_is_the_user_function(run, name):
    found = names_in(run)
    assert name in found, found
    assert not any(part == given for given in found for part in INTERNAL), found
