"""

remat of functions of objects: the same numbers and the same state, computed twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    CallMismatchError,
    CapturedObjectError,
    InconsistentAliasError,
    SharedObjectError,
    TransformArgumentError,
    TransformOptionError,
)


class LoRA(nnx.Param):
    pass


class Model(nnx.Module):
    def __init__(self, w=3.0):
        self.w = nnx.Param(jnp.asarray(w), note="kept")
        self.part = nnx.Dict(a=LoRA(jnp.asarray(0.5)), n=nnx.BatchStat(jnp.asarray(2.0)))
        self.arr = nnx.data(jnp.asarray(4.0))


def loss(m, x=1.0):
    return (m.w * m.part.a * m.part.n * m.arr) * x


def names(grads):
    return {p[-1]: float(jnp.asarray(v)) for p, v in nnx.to_flat_state(grads)}


def test_keyword_arguments_are_updated_not_differentiated():
    m, other = Model(), Model()

    def f(m, *, other, k=1.0):
        other.part.n[...] += 1
        return loss(m) * loss(other) * k

    assert names(nnx.grad(f)(m, other=other, k=2.0))["w"] == 4 * 18 * 2
    assert float(other.part.n) == 3
    assert names(nnx.grad(loss)(x=2.0, m=m))["w"] == 8


def test_invalid_arguments_raise():
    m = Model()
    with pytest.raises(
        CallMismatchError, match="grad: argnums has 3, but the function was called wi"
    ):
        nnx.grad(loss, argnums=3)(m)
    with pytest.raises(TypeError, match=r"argnums has 0, but .* with 0 positional"):
        nnx.grad(lambda: 1.0)()
    with pytest.raises(
        TransformArgumentError, match="argnums has -1 twice; use each position once"
    ):
        nnx.grad(loss, argnums=(0, -1))(m)
    with pytest.raises(
        TransformArgumentError, match="argnums has 'w'; use positions of arguments, or"
    ):
        nnx.grad(loss, argnums=("w",))
    for argnums in (nnx.StateAxes({...: 0}), None):
        with pytest.raises(TransformArgumentError, match=r"argnums has .*; use positions"):
            nnx.grad(loss, argnums=argnums)
    with pytest.raises(TransformArgumentError, match=r"nondiff_argnums has StateAxes.*; give pos"):
        nnx.custom_vjp(loss, nondiff_argnums=nnx.StateAxes({...: 0}))
    for call in (
        lambda: nnx.grad(loss, reduce_axes=("i",)),
        lambda: nnx.vjp(loss, m, reduce_axes=("i",)),
    ):
        with pytest.raises(
            TransformOptionError, match=r"reduce_axes=\('i',\), which JAX no longer"
        ):
            call()
    with pytest.raises(NotImplementedError):
        nnx.value_and_grad(loss, reduce_axes=("i",))
    for wrong in (lambda m: m, lambda m: m.w):
        with pytest.raises(
            CallMismatchError, match="value_and_grad: the function returns an object wh"
        ):
            nnx.value_and_grad(wrong)(m)
    with pytest.raises(TypeError, match="scalar"):
        nnx.grad(lambda m: m.w * jnp.ones(2))(m)
    with pytest.raises(TypeError, match="real- or complex"):
        nnx.grad(lambda v: v * 1.0)(nnx.Param(jnp.array(3)))


def test_inconsistent_alias_roles():
    m = Model()
    with pytest.raises(
        InconsistentAliasError, match=r"argnums gives a gradient to a\.\S+, and argnums"
    ):
        nnx.grad(lambda a, b: loss(a))(m, m)
    with pytest.raises(InconsistentAliasError, match=r"gives no gradient to b\.w"):
        nnx.grad(lambda a, b: loss(a))(m, nnx.Dict(w=m.w))
    with pytest.raises(
        CapturedObjectError, match=r"nnx\.grad\(<lambda>\): the result\[1\] is a Mod"
    ):
        nnx.grad(lambda x: (x, m), has_aux=True)(1.0)


def test_exception_leaves_state_unchanged():
    m = Model()

    def stop(m):
        m.w[...] += 1
        raise KeyError("stop")

    for call in (nnx.grad(stop), nnx.value_and_grad(stop), lambda m: nnx.vjp(stop, m)):
        with pytest.raises(KeyError, match="stop"):
            call(m)
    assert float(m.w) == 3


def test_pullbacks_keep_names_and_escape_transforms():
    m = Model()

    def f(m):
        m.a_new = nnx.Intermediate(m.w * 2)
        return loss(m)

    _, pull = nnx.jit(lambda m: nnx.vjp(f, m))(m)
    assert names(pull(jnp.float32(1.0))[0]) == {"w": 4.0, "a": 24.0}


def test_mismatched_tangents_are_rejected():
    m = Model()
    with pytest.raises(
        CallMismatchError, match="jvp: there are 1 primals and 2 tangents; pass one"
    ):
        nnx.jvp(loss, (m,), (m, m))
    with pytest.raises(CallMismatchError, match="jvp: there are 1 primals and 0 tangents"):
        nnx.jvp(loss, (m,))
    with pytest.raises(CallMismatchError, match=r"of a Model is a \w+ with a value at ''"):
        nnx.jvp(loss, (m,), (1.0,))
    with pytest.raises(
        CallMismatchError, match=r"is a Dict with a value at 'other', where the prim"
    ):
        nnx.jvp(loss, (m,), (nnx.Dict(other=nnx.Param(1.0)),))
    with pytest.raises(
        CallMismatchError, match="jvp: the function returns an object where its result"
    ):
        nnx.jvp(lambda m: m.w, (m,), (m,))
    with pytest.raises(
        CallMismatchError, match=r"the same \w+ is at two .* nnx\.clone\(\.\.\.\) in"
    ):
        nnx.jvp(lambda m, n: loss(m) * n.w, (m, m), (m, m))


class Pair(nnx.Module):
    def __init__(self, w, n):
        self.w, self.n = nnx.Param(w), nnx.Variable(jnp.asarray(n))


PLAIN = [{"graph": False}, {"graph_updates": False}]


@pytest.mark.parametrize("mode", PLAIN, ids=str)
def test_invalid_results_and_cotangents(mode):
    m = Model()
    other = Model()
    with pytest.raises(CallMismatchError, match=r"the cotangent PyTreeDef.*; pass a cotangent of"):
        nnx.vjp(lambda m: Pair(m.w * 2, 1), m, **mode)[1](jnp.array(1.0))
    for f, error, words in [
        (lambda m: m.part, SharedObjectError, r"the same \w+ .*m.part"),
        (lambda m: other, CapturedObjectError, "is a Model that was created outside"),
    ]:
        with pytest.raises(error, match=words):
            nnx.vjp(f, m, **mode)
        with pytest.raises(error, match=words):
            nnx.jvp(f, (m,), (m,), **mode)
    twice = lambda m: [nnx.Param(m.w * 2)] * 2  # noqa: E731
    if mode == {"graph": False}:
        with pytest.raises(SharedObjectError, match="the same Param of shape"):
            nnx.vjp(twice, m, **mode)
    else:
        first, second = nnx.vjp(twice, m, **mode)[0]
        assert first is second


class Shared(nnx.Module):
    def __init__(self, variable):
        self.a, self.b = variable, nnx.Param(jnp.array(5.0))


def test_shared_values_have_a_gradient_per_argument():
    modes = {"graph_updates": False, "argnums": (0, 1)}
    variable = nnx.Param(jnp.array(2.0))
    grads = nnx.grad(lambda a, b: a[...] * b[...] ** 2, **modes)(variable, variable)
    assert [type(g) for g in grads] == [nnx.Param] * 2 and grads[0] is not grads[1]
    assert [g[...] for g in grads] == [12, 12]
    left, right = Shared(variable), Shared(variable)
    of_left, of_right = nnx.grad(lambda x, y: x.a * y[0].a + x.b, **modes)(left, [right])
    assert of_left.a[...] == of_right[0].a[...] == 4 and type(of_left) is Shared
    assert of_left.b[...] == 1 and of_right[0].b[...] == 0
    same = nnx.grad(lambda x, y: x.a * y.b, **modes)(left, left)
    assert [g.a[...] for g in same] == [5, 5] and [g.b[...] for g in same] == [2, 2]
    assert same[0].a is not same[1].a


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.arange(3.0))
        self.calls = nnx.BatchStat(jnp.array(0))

    @nnx.remat(static_argnums=2)
    def __call__(self, x: jax.Array, power: int = 1, *, scale: float = 1.0) -> jax.Array:
        self.calls[...] += 1
        return jnp.sin(self.w * x * scale) ** power


def test_values_are_recomputed_in_the_backward_pass():
    def twice(m: Layer, x: jax.Array) -> jax.Array:
        return jnp.sin(jnp.sin(m.w * x)).sum()

    def count(f: Callable[..., Any]) -> int:
        graphdef, state = nnx.split(Layer())
        both = lambda s: nnx.value_and_grad(f)(nnx.merge(graphdef, s), 2.0)  # noqa: E731
        return str(jax.make_jaxpr(both)(state)).count(" sin ")

    assert count(nnx.remat(twice)) > count(twice) == 2


def test_policy_selects_residuals():
    keep = jax.checkpoint_policies.everything_saveable
    f = nnx.remat(lambda m, x: jnp.sin(m.w * x).sum(), policy=keep, prevent_cse=False)
    assert jnp.allclose(nnx.grad(f)(Layer(), 0.0).w[...], 0.0)


def test_bound_method_is_rejected():
    with pytest.raises(TransformArgumentError, match=r"method of a Layer.*write @nnx.remat above"):
        nnx.remat(Layer().__call__)
