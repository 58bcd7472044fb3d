"""Functions of objects with derivatives of their own."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import CapturedObjectError, TransformArgumentError


class Model(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.BatchStat(jnp.array(0))
        self.w = nnx.Param(jnp.array(2.0))


def product(m: Model, x: jax.Array) -> jax.Array:
    m.calls[...] += 1
    return m.w * x


def test_none_is_zero_and_invalid_gradients_fail():
    def failing(given: Any) -> Any:
        f = nnx.custom_vjp(lambda m, x: m.w * x)
        f.defvjp(lambda m, x: (f(m, x), None), lambda r, g: given)
        return nnx.grad(f, argnums=(0, 1))(Model(), 3.0)

    of_model, of_x = failing((None, None))
    assert float(of_model.w[...]) == 0.0 and float(of_x) == 0.0
    with pytest.raises(TransformArgumentError, match="returns 1 values for 2 arguments"):
        failing((None,))
    with pytest.raises(
        TransformArgumentError, match="a gradient at 'v', where the argument has no"
    ):
        failing((nnx.State({"v": jnp.ones(())}), None))


def test_missing_rule_error_names_the_fix():
    with pytest.raises(TransformArgumentError, match=r"call f.defvjp\(fwd, bwd\) first"):
        nnx.custom_vjp(product)(Model(), 1.0)
    with pytest.raises(TransformArgumentError, match=r"call f.defjvp\(rule\) first"):
        nnx.custom_jvp(product)(Model(), 1.0)


def test_jvp_rule_works_in_both_modes():
    f = nnx.custom_jvp(product)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (m, x), (of_model, of_x) = primals, tangents
        return product(m, x), 10 * (of_model.w[...] * x + m.w * of_x)

    model = Model()
    grads = nnx.grad(f, argnums=(0, 1))(model, 3.0)
    assert float(grads[0].w[...]) == 30.0 and float(grads[1]) == 20.0
    assert int(model.calls) == 1
    tangents = (nnx.State({"w": jnp.array(1.0)}), 0.0)
    assert [float(x) for x in nnx.jvp(f, (model, 3.0), tangents)] == [6.0, 30.0]


class Pair(nnx.Module):
    """A parameter, a count, and something static."""

    def __init__(self, w=2.0):
        self.w, self.n, self.k = nnx.Param(jnp.array(w)), nnx.BatchStat(jnp.zeros(())), 3


@pytest.mark.parametrize("modes", [{}, {"graph": False}, {"graph_updates": False}], ids=str)
@pytest.mark.parametrize("is_nested", [False, True])
def test_cotangents_of_a_returned_object(modes, is_nested):
    @nnx.custom_vjp(**modes)
    def scaled(pair, x):
        made = Pair(pair.w[...] * x)
        return (x, [made, Pair()]) if is_nested else made

    def bwd(residuals, g):
        pair, x = residuals
        out_g = g[1] if not modes else g
        seen.append(type(out_g[1][0] if is_nested else out_g))
        w_g = (out_g[1][0] if is_nested else out_g).w[...]
        pair_g = nnx.clone(pair)
        pair_g.w[...], pair_g.n[...] = 10 * x * w_g, 0.0
        return pair_g, pair.w[...] * w_g

    seen = []
    scaled.defvjp(lambda pair, x: (scaled(pair, x), (pair, x)), bwd)

    def loss(pair, x):
        out = scaled(pair, x)
        return 7 * (out[1][0] if is_nested else out).w[...]

    grads, x_g = nnx.grad(loss, argnums=(0, 1), **modes)(Pair(), 3.0)
    assert grads.w[...] == 210 and x_g == 14
    assert seen == [nnx.State if not modes else Pair]


def test_updates_g_has_cotangents_of_changed_state():
    @nnx.custom_vjp(graph=False)
    def f(pair, variable, x, rest):
        pair.n[...] = pair.w * x
        variable[...] *= x
        return x * 1.0

    seen = []

    def bwd(residuals, g, *, updates_g):
        seen.append((g, updates_g))
        return jax.tree.map(jnp.zeros_like, residuals)

    f.defvjp(lambda *args: (f(*args), args), bwd)

    def loss(pair, variable, x, rest):
        return f(pair, variable, x, rest) + 5 * pair.n[...] + 3 * variable[...]

    args = Pair(), nnx.Param(jnp.array(1.0)), 3.0, {"a": nnx.Param(jnp.ones(2)), "b": 1.0}
    nnx.grad(loss, graph=False)(*args)
    ((g, (pair, variable, x, rest)),) = seen
    assert g == 1 and pair.n[...] == 5 and pair.w is None and pair.k == 3
    assert variable[...] == 3 and x is None and rest == {"a": None, "b": None}


def doubled(m: Model, x: jax.Array) -> dict[str, Any]:
    made = Model()
    made.w[...] = m.w * x
    return {"made": made, "v": nnx.Param(m.w * 2), "y": m.w + x}


@pytest.mark.parametrize("modes", [{}, {"graph": False}, {"graph_updates": False}], ids=str)
@pytest.mark.parametrize("as_state", [False, True])
def test_jvp_rule_returns_objects(modes: Any, as_state: bool):
    f = nnx.custom_jvp(doubled, **modes)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        (m, x), (of_m, of_x) = primals, tangents
        t = of_m["w"][...] if isinstance(of_m, nnx.State) else of_m.w[...]
        tangent = nnx.State({"w": nnx.Param(10 * t * x + of_x * m.w)})
        if not as_state:
            made = Model()
            made.w[...] = tangent["w"][...]
            made.calls[...] = 0
            tangent = nnx.Dict(w=made.w)
        return doubled(m, x), {"made": tangent, "v": nnx.Param(20 * t), "y": t}

    def loss(m: Model, x: jax.Array) -> jax.Array:
        out = f(m, x)
        assert type(out["made"]) is Model and type(out["v"]) is nnx.Param
        return out["made"].w * 1.0 + out["v"] * 1.0 + out["y"]

    take = nnx.value_and_grad(loss, argnums=(0, 1), allow_int=True, **modes)
    value, (of_m, of_x) = take(Model(), jnp.array(3.0))
    assert float(value) == 6 + 4 + 5
    assert float(of_m["w"][...] if not modes else of_m.w[...]) == 30 + 20 + 1
    assert float(of_x) == 2


@pytest.mark.parametrize(
    ("result", "tangent", "words"),
    [
        (lambda m: m, nnx.Dict(calls=nnx.Param(1.0)), "tangent at 'calls', where its result has"),
        (lambda m: Model(), nnx.Dict(z=nnx.Param(1.0)), "tangent at 'z', where its result has"),
        (lambda m: m.w * 2, nnx.Param(1.0), "a Param as the tangent of a result that is not an"),
    ],
)
def test_mismatched_tangents_of_a_rule_are_named(result: Any, tangent: Any, words: str):
    f = nnx.custom_jvp(result)
    f.defjvp(lambda primals, _: (result(*primals), tangent))
    with pytest.raises(TransformArgumentError, match=words):
        nnx.jvp(lambda m: (jnp.ones(()), f(m))[0], (Model(),), (nnx.state(Model(), nnx.Param),))


def times_ten(fun: Any, of_result: float = 0.0) -> Any:
    """`fun`, whose rule multiplies cotangents of the state by 10, and adds some for `w`."""
    f = nnx.custom_vjp(fun)

    def bwd(args: Any, g: Any) -> Any:
        (of_model, *_), out_g = g
        of_model["w"][...] = 10 * of_model["w"][...]
        if of_result:
            of_model["w"][...] += of_result * out_g
        return of_model, *(None for _ in args[1:])

    f.defvjp(lambda *args: (fun(*args), args), bwd)
    return f


class Held(nnx.Module):
    """A parameter, and an array that is not in a variable."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array(2.0))
        self.array = jnp.array(3.0)


class Params(nnx.Module):
    def __init__(self) -> None:
        self.v, self.w = nnx.Param(jnp.array(5.0)), nnx.Param(jnp.array(2.0))


def gradient(loss: Any, model: nnx.Module, where: Any = nnx.Param) -> Any:
    return nnx.to_pure_dict(nnx.grad(loss, argnums=nnx.DiffState(0, where))(model))


def test_unchanged_arrays_of_attributes_come_out_of_rules():
    f = nnx.custom_vjp(lambda m: m.w * m.array)

    def bwd(residuals: None, g: Any) -> Any:
        return (nnx.State({"array": 10 * g[0][0]["array"] + 100 * g[1]}),)

    f.defvjp(lambda m: (f(m), None), bwd)
    model = Held()
    assert gradient(lambda m: f(m) + m.array, model, ...)["array"] == 110
    assert model.array == 3


def over_examples(f: Any) -> Any:
    return nnx.vmap(f, in_axes=(None, 0))


def scanned(axis: Any, **modes: Any) -> Any:
    return lambda f: nnx.scan(f, in_axes=(axis, 0), out_axes=0, **modes)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, 100 * 6 + 10),
        (nnx.jit, 100 * 6 + 10),
        (nnx.remat, 100 * 6 + 10),
        (lambda f: lambda m, x: nnx.cond(True, f, f, m, x), 100 * 6 + 10),
        (over_examples, 100 * 6 + 3 * 10),
        # A scan that shares the model begins each iteration with the values from before it.
        (scanned(None), 100 * 6 + 1),
        (lambda f: scanned(None)(nnx.remat(nnx.jit(f))), 100 * 6 + 1),
        (scanned(None, graph_updates=False), 100 * (1 + 20 + 300) + 1000),
    ],
    ids=["none", "jit", "remat", "cond", "vmap", "shared", "shared nested", "carried"],
)
def test_values_that_rules_leave_inside_transformations(transform: Any, expected: float):
    f = nnx.custom_vjp(lambda m, x: m.w * x)

    def bwd(args: Any, g: Any) -> Any:
        (of_model, _), out_g = g
        of_model["w"][...] = 10 * of_model["w"][...] + 100 * (out_g * args[1]).sum()
        return of_model, jnp.zeros_like(args[1])

    f.defvjp(lambda m, x: (f(m, x), (m, x)), bwd)

    def loss(m: Held) -> jax.Array:
        return transform(f)(m, jnp.arange(1.0, 4)).sum() + m.w[...]

    options = inspect.signature(jax.custom_vjp.defvjp).parameters
    if transform is over_examples and "generic_batching" in options:
        # JAX 0.12 refuses, since each example would add the gradient that the model has besides.
        with pytest.raises(ValueError, match="shared across the batch"):
            gradient(loss, Held())
    else:
        assert gradient(loss, Held())["w"] == expected


def test_captured_objects_keep_values_and_are_not_returned():
    f, of_result = times_ten(lambda m, x: m.w * x, of_result=100), times_ten(lambda m: m.w)
    for g in (f, nnx.jit(f), nnx.remat(nnx.jit(lambda m, x: f(m, x)))):
        model = Held()
        before = model.w.get_value()
        mapped = jax.vmap(lambda x: g(model, x))(jnp.ones(3))  # noqa: B023
        assert mapped.tolist() == [2, 2, 2] and model.w.get_value() is before
    with pytest.raises(CapturedObjectError, match=r"the result.* is a Param.* return nnx.clone"):
        jax.jit(lambda x: of_result(model) * x)(1.0)


def test_values_without_gradients_bypass_rules():
    f = nnx.custom_vjp(lambda m: (m.w, m.n), nondiff_argnums=nnx.DiffState(0, nnx.Param))
    f.defvjp(lambda m: ((m.w, m.n), None), lambda r, g: (nnx.State({"w": 10 * g[0][0]["w"][...]}),))
    model = nnx.Dict(w=nnx.Param(jnp.array(3.0)), n=nnx.BatchStat(jnp.array(2.0)))

    def loss(m: Any) -> jax.Array:
        w, n = f(m)
        return w + n

    assert gradient(loss, model, ...) == {"w": 10, "n": 1}


def tripled(m: Params) -> Params:
    m.v[...] = m.v * 3
    return m


@pytest.mark.parametrize(
    ("fun", "tangent", "read", "expected"),
    [
        (lambda m: m.w, lambda t: t.w, lambda m, out: out + m.v, {"w": 10, "v": 1}),
        (lambda m: m.w, lambda t: t.w, lambda m, out: m.w + m.v, {"w": 10, "v": 1}),
        (lambda m: m, lambda t: t, lambda m, out: out.w + m.v, {"w": 10, "v": 10}),
        (lambda m: m, lambda t: nnx.State({}), lambda m, out: m.w[...], {"w": 0, "v": 0}),
        (tripled, lambda t: t, lambda m, out: m.w + m.v, {"w": 10, "v": 10}),
        (lambda m: m.w * 2, lambda t: t.w[...], lambda m, out: out + m.w, {"w": 11, "v": 0}),
    ],
    ids=["variable", "read again", "object", "no tangent", "changed", "not returned"],
)
def test_returned_arguments_have_tangents_of_rules(fun, tangent, read, expected):
    f = nnx.custom_jvp(fun)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        return fun(*primals), jax.tree.map(lambda x: 10 * x, tangent(*tangents))

    assert gradient(lambda m: read(m, f(m)), Params()) == expected
