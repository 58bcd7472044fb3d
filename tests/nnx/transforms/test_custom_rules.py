"""Functions of objects with derivatives of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TransformArgumentError


class Model(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.BatchStat(jnp.array(0))
        self.w = nnx.Param(jnp.array(2.0))


def product(m: Model, x: jax.Array) -> jax.Array:
    m.calls[...] += 1
    return m.w * x


def with_rule(**options: Any) -> Any:
    """Returns `product` with gradients ten times too large."""
    f = nnx.custom_vjp(product, **options)

    def fwd(m: Model, x: jax.Array) -> tuple[jax.Array, Any]:
        return f(m, x), (m, x)

    def bwd(residuals: Any, g: Any) -> Any:
        m, x = residuals
        (of_model, of_x), out_g = g
        assert of_x is None and set(of_model) == {"calls", "w"}
        of_model.w[...] = 10 * out_g * x
        return of_model, 10 * out_g * m.w

    f.defvjp(fwd, bwd)
    return f


@pytest.mark.parametrize("jit", [False, True])
def test_rule_defines_gradients_and_writes_once(jit: bool):
    model, f = Model(), with_rule()
    take = nnx.value_and_grad(f, argnums=(0, 1))
    value, (of_model, of_x) = (nnx.jit(take) if jit else take)(model, 3.0)
    assert float(value) == 6.0 and int(model.calls) == 1
    assert type(of_model.w) is nnx.Param
    assert float(of_model.w[...]) == 30.0 and float(of_x) == 20.0


def test_plain_call_runs_function():
    model = Model()
    assert float(with_rule()(model, x=3.0)) == 6.0 and int(model.calls) == 1


def test_cotangents_of_written_state():
    @nnx.custom_vjp
    def write(m: Model) -> jax.Array:
        m.w[...] = m.w * 3
        return m.w[...]

    def bwd(residuals: None, g: Any) -> Any:
        (of_model,), out_g = g
        return nnx.State({"w": of_model.w[...] * 3 + out_g * 100})

    write.defvjp(lambda m: (write(m), None), lambda r, g: (bwd(r, g),))

    def loss(m: Model) -> jax.Array:
        out = write(m)
        return out + 7 * m.w[...]

    assert float(nnx.grad(loss)(Model()).w[...]) == 7 * 3 + 100


def test_tree_mode_gets_only_result_cotangent():
    f = nnx.custom_vjp(lambda m: m.w[...] ** 2, graph=False)
    f.defvjp(lambda m: (f(m), m), lambda m, g: (nnx.Dict(w=nnx.Param(g * 50)),))
    grads = nnx.grad(f, graph=False)(nnx.Dict(w=nnx.Param(jnp.array(3.0))))
    assert type(grads) is nnx.Dict and float(grads.w[...]) == 50.0


def test_part_of_an_object_and_arguments_without_gradient():
    f = nnx.custom_vjp(
        lambda scale, m: scale(m.w[...] * m.n[...]),
        nondiff_argnums=(0, nnx.DiffState(1, nnx.Param)),
    )

    def bwd(scale: Any, residuals: Any, g: Any) -> Any:
        (of_model,), out_g = g
        return (nnx.filter_state(of_model, nnx.Param).map(lambda _, x: scale(out_g)),)

    f.defvjp(lambda scale, m: (f(scale, m), None), bwd)
    model = nnx.Dict(w=nnx.Param(jnp.array(3.0)), n=nnx.BatchStat(jnp.array(2.0)))
    grads = nnx.grad(lambda m: f(lambda x: 5 * x, m))(model)
    assert {k: float(v) for k, v in grads.to_pure_dict().items()} == {"w": 5.0}


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


def test_as_a_method():
    class Scaled(Model):
        @nnx.custom_vjp
        def scaled(self, x: jax.Array) -> jax.Array:
            return self.w * x

    Scaled.scaled.defvjp(
        lambda m, x: (Scaled.scaled(m, x), None), lambda r, g: (nnx.State({"w": 4 * g[1]}), None)
    )
    assert float(nnx.grad(lambda m: m.scaled(3.0))(Scaled()).w[...]) == 4.0


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
        (lambda m: m, nnx.Dict(w=nnx.Param(1.0)), "tangent at 'w', where its result has no new"),
        (lambda m: Model(), nnx.Dict(z=nnx.Param(1.0)), "tangent at 'z', where its result has"),
        (lambda m: m.w * 2, nnx.Param(1.0), "a Param as the tangent of a result that is not an"),
    ],
)
def test_mismatched_tangents_of_a_rule_are_named(result: Any, tangent: Any, words: str):
    f = nnx.custom_jvp(result)
    f.defjvp(lambda primals, _: (result(*primals), tangent))
    with pytest.raises(TransformArgumentError, match=words):
        nnx.jvp(lambda m: (jnp.ones(()), f(m))[0], (Model(),), (nnx.state(Model(), nnx.Param),))
