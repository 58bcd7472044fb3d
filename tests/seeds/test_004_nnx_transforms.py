"""The programs that JAX-style transformations of objects are explained with.

What the explanation accepts computes, and what it rejects is rejected with an error that shows both
places, what was said of each, and the line to change.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft import nnx
from weft.errors import (
    CapturedObjectError,
    InconsistentAliasError,
    SharedObjectError,
    StateFilterError,
    TransformArgumentError,
)

MESH = Mesh(jax.devices()[:1], ("d",))
W = jnp.arange(9.0).reshape(3, 3)
STATS = 10 * jnp.ones(3)


class SomeModule(nnx.Module):
    def __init__(self, w=W, stats=STATS):
        self.w = nnx.Param(w)
        self.stats = nnx.BatchStat(stats)


class Foo(nnx.Module):
    def __init__(self, shared):
        self.shared = shared


def text_of(error):
    """Returns the message of an error in one line."""
    return " ".join(str(error.value).split())


def shows_line(error, text):
    """Returns whether a message ends with the line of this file that starts with `text`."""
    found = re.search(r"The line to change is (\S+):(\d+): (.*)$", text_of(error))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return (
        found is not None
        and Path(found[1]).name == Path(__file__).name
        and lines[int(found[2]) - 1].strip().startswith(text)
        and found[3].startswith(text)
    )


# Accepted programs.


def test_arguments_are_mapped_along_in_axes():
    m1, m2 = SomeModule(), SomeModule(w=2 * W)

    @nnx.vmap(in_axes=(1, 0))
    def f(m1, m2):
        m1.w[...] += 1
        return m1.w @ m2.w

    m1.stats = nnx.BatchStat(STATS[None])
    np.testing.assert_allclose(f(m1, m2), jax.vmap(jnp.dot, (1, 0))(W + 1, 2 * W))
    np.testing.assert_array_equal(m1.w[...], W + 1)


def test_parts_of_a_state_are_mapped_by_filters():
    m1, m2 = SomeModule(), SomeModule(w=2 * W, stats=jnp.arange(3.0))
    state_axes = nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: None})

    @nnx.vmap(in_axes=(state_axes, 0))
    def f(m1, m2):
        return m1.w @ m2.w + m1.stats.sum() + m2.stats

    expected = jax.vmap(lambda a, b, c: a @ b + 30 + c, (1, 0, 0))(W, 2 * W, jnp.arange(3.0))
    np.testing.assert_allclose(f(m1, m2), expected)


def test_filters_may_select_by_argument():
    m1, m2 = SomeModule(w=W, stats=W), SomeModule(w=2 * W, stats=W)
    axes = nnx.StateAxes({(lambda path, value: path[0] == 0): 1, ...: 0})
    both = nnx.List([m1, m2])

    @nnx.vmap(in_axes=(axes,))
    def f(both):
        return both[0].w @ both[1].w

    np.testing.assert_allclose(f(both), jax.vmap(jnp.dot, (1, 0))(W, 2 * W))


class LoRAParam(nnx.Param):
    pass


def test_part_of_a_state_is_differentiated():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(3.0))
            self.lora = LoRAParam(jnp.array(0.5))

    def loss_fn(model, x, y):
        return ((model.w + model.lora) * x - y) ** 2

    model, x, y = Model(), 2.0, 1.0
    (grads,) = nnx.grad(loss_fn, argnums=(nnx.DiffState(0, LoRAParam),))(model, x, y)
    assert list(grads) == ["lora"]
    assert type(grads["lora"]) is LoRAParam
    assert float(grads["lora"][...]) == 2 * (3.5 * 2 - 1) * 2


def test_streams_are_split_before_the_transformation():
    rngs = nnx.Rngs(0)

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def f(rngs):
        return jax.random.normal(rngs.params())

    keys = jax.random.split(nnx.Rngs(0).params(), 3)
    values = f(rngs)
    assert len(set(values.tolist())) == 3
    assert rngs.default.key[...].shape == () and int(rngs.default.count[...]) == 1
    assert keys.shape == (3,)


M1_AXES = nnx.StateAxes({nnx.Param: 1, ...: None})
M2_AXES = nnx.StateAxes({nnx.Param: 0, ...: None})


def test_aliases_with_the_same_specification_are_accepted():
    m1, m2 = SomeModule(), SomeModule(w=2 * W)

    @nnx.vmap(in_axes=(M1_AXES, M2_AXES, M1_AXES), out_axes=M2_AXES)
    def f(m1, m2, m1_alias):
        assert m1 is m1_alias
        m2.w[...] += m1_alias.w
        return m2

    assert f(m1, m2, m1) is m2
    np.testing.assert_array_equal(m2.w[...], 2 * W + W.T)


# Rejected programs. All errors show the line that transforms the function.


def test_inconsistent_input_aliases():
    m = SomeModule(stats=W)

    @nnx.vmap(in_axes=(0, 1))
    def f(m1, m2):
        raise AssertionError("not called")

    with pytest.raises(InconsistentAliasError, match=r"nnx\.vmap") as error:
        f(m, m)
    assert "in_axes gives 0 to m1.stats, and in_axes gives 1 to m2.stats" in text_of(error)
    assert shows_line(error, "@nnx.vmap(in_axes=(0, 1))")
    assert isinstance(error.value, ValueError)
    np.testing.assert_array_equal(m.w[...], W)


def test_inconsistent_input_and_output_aliases():
    m = SomeModule(stats=W)

    @nnx.vmap(in_axes=0, out_axes=1)
    def g(m):
        return m

    with pytest.raises(InconsistentAliasError) as error:
        g(m)
    assert "in_axes gives 0 to m.stats, and out_axes gives 1 to the result.stats" in text_of(error)
    assert shows_line(error, "@nnx.vmap(in_axes=0, out_axes=1)")


def test_inconsistent_aliases_in_nested_structures():
    m = SomeModule(stats=W)

    @nnx.vmap(in_axes=0, out_axes=1)
    def f(m):
        return Foo(m)

    with pytest.raises(InconsistentAliasError) as error:
        f(m)
    expected = "in_axes gives 0 to m.stats, and out_axes gives 1 to the result.shared.stats"
    assert expected in text_of(error)
    assert shows_line(error, "@nnx.vmap(in_axes=0, out_axes=1)")


def test_shared_part_with_different_specifications():
    shared = SomeModule(stats=W)
    m1, m2 = Foo(shared), Foo(shared)

    @nnx.vmap(in_axes=(0, 1))
    def f(m1, m2):
        raise AssertionError("not called")

    with pytest.raises(InconsistentAliasError) as error:
        f(m1, m2)
    expected = "in_axes gives 0 to m1.shared.stats, and in_axes gives 1 to m2.shared.stats"
    assert expected in text_of(error)
    assert shows_line(error, "@nnx.vmap(in_axes=(0, 1))")


def test_captured_module_cannot_be_an_output():
    m = SomeModule()

    @nnx.vmap(out_axes=0, axis_size=5)
    def f():
        return m

    with pytest.raises(CapturedObjectError, match=r"nnx\.vmap") as error:
        f()
    assert "the result is a SomeModule that was created outside" in text_of(error)
    assert re.search(
        r"It was made at \S*test_004_nnx_transforms.py:\d+\. Pass it as an", text_of(error)
    )
    assert shows_line(error, "@nnx.vmap(out_axes=0, axis_size=5)")
    assert isinstance(error.value, ValueError)


def test_aliases_with_different_axes():
    m1, m2 = SomeModule(), SomeModule(w=2 * W)
    f = nnx.vmap(lambda m1, m2, alias: None, in_axes=(M1_AXES, M2_AXES, M2_AXES))
    with pytest.raises(InconsistentAliasError, match="the same Param of shape") as error:
        f(m1, m2, m1)
    assert "in_axes gives 1 to m1.w, and in_axes gives 0 to alias.w" in text_of(error)
    assert shows_line(error, "f = nnx.vmap(lambda")


P = PartitionSpec


def nothing(a, b):
    return None


# The rule holds for all transformations with roles of arguments.
REJECTED = {
    "scan": (
        lambda m: nnx.scan(lambda a, b: (a, None), in_axes=(nnx.Carry, 0))(m, m),
        "in_axes gives nnx.Carry to a.stats, and in_axes gives 0 to b.stats",
    ),
    "scan_shared": (
        lambda m: nnx.scan(lambda a, b: a, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(
            m, m
        ),
        "in_axes gives nnx.Carry to a.stats, and in_axes gives None to b.stats",
    ),
    "scan_output": (
        lambda m: nnx.scan(lambda c, m: (c, Foo(m)), out_axes=(nnx.Carry, 1))(1.0, m),
        "in_axes gives 0 to m.stats, and out_axes gives 1 to the result[1].shared.stats",
    ),
    "pmap": (
        lambda m: nnx.pmap(nothing, in_axes=(0, 1))(m, m),
        "in_axes gives 0 to a.stats, and in_axes gives 1 to b.stats",
    ),
    "shard_map": (
        lambda m: nnx.shard_map(nothing, mesh=MESH, in_specs=(P("d"), P()), out_specs=P())(m, m),
        "in_specs gives P('d',) to a.stats, and in_specs gives P() to b.stats",
    ),
    "shard_map_output": (
        lambda m: nnx.shard_map(lambda m: m, mesh=MESH, in_specs=P("d"), out_specs=P())(m),
        "in_specs gives P('d',) to m.stats, and out_specs gives P() to the result.stats",
    ),
    "grad": (
        lambda m: nnx.grad(lambda a, b: a.w.sum())(m, m),
        "argnums gives a gradient to a.w, and argnums gives no gradient to b.w",
    ),
    "grad_of_parts": (
        lambda m: nnx.grad(lambda a, b: a.w.sum(), argnums=(0, nnx.DiffState(1, ...)))(m, Foo(m)),
        "argnums gives no gradient to a.stats, and argnums gives a gradient to b.shared.stats",
    ),
    "values_only": (
        lambda m: nnx.vmap(nothing, in_axes=(0, 1), graph_updates=False)(m, m),
        "in_axes gives 0 to a.stats, and in_axes gives 1 to b.stats",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_other_transformations_reject_inconsistent_aliases(name):
    program, expected = REJECTED[name]
    m = SomeModule(stats=W)
    with pytest.raises(InconsistentAliasError) as error:
        program(m)
    assert expected in text_of(error)
    assert re.search(r"The line to change is \S*test_004_nnx_transforms\.py:\d+: ", text_of(error))
    np.testing.assert_array_equal(m.w[...], W)


CAPTURED = SomeModule(stats=W)
RETURNED = {
    "scan": lambda: nnx.scan(lambda c, x: (c, CAPTURED))(0.0, STATS),
    "grad": lambda: nnx.grad(lambda x: (x, CAPTURED), has_aux=True)(0.0),
    "vjp": lambda: nnx.vjp(lambda x: (x, Foo(CAPTURED)), 0.0, has_aux=True),
    "jvp": lambda: nnx.jvp(lambda x: (x, CAPTURED), (0.0,), (0.0,), has_aux=True),
    "cond": lambda: nnx.cond(True, lambda: CAPTURED, lambda: CAPTURED),
    "switch": lambda: nnx.switch(0, [lambda: CAPTURED, SomeModule]),
    "remat": lambda: nnx.remat(lambda x: [CAPTURED.w])(0.0),
    "pmap": lambda: nnx.pmap(lambda x: CAPTURED)(jnp.ones(1)),
    "shard_map": lambda: nnx.shard_map(lambda x: CAPTURED, mesh=MESH, in_specs=P(), out_specs=P())(
        0.0
    ),
    "jit": lambda: nnx.jit(lambda: CAPTURED)(),
    "eval_shape": lambda: nnx.eval_shape(lambda: CAPTURED),
    "checkify": lambda: nnx.checkify(lambda x: CAPTURED)(0.0),
    "tree": lambda: nnx.vmap(lambda x: CAPTURED, graph=False)(STATS),
}


@pytest.mark.parametrize("name", RETURNED)
def test_returning_captured_objects_is_rejected(name):
    with pytest.raises(
        CapturedObjectError, match="that was created outside and not passed"
    ) as error:
        RETURNED[name]()
    assert re.search(r"the result\S* is a ", text_of(error))
    assert f"nnx.{'vmap' if name == 'tree' else name}(" in text_of(error)
    assert re.search(r"The line to change is \S*test_004_nnx_transforms\.py:\d+: ", text_of(error))


def test_captured_objects_cannot_be_attached():
    def f(m):
        m.other = CAPTURED

    with pytest.raises(CapturedObjectError, match=r"m\.other is a SomeModule"):
        nnx.vmap(f)(SomeModule(stats=W))
    assert not hasattr(CAPTURED, "other")


def test_loops_must_return_their_objects():
    with pytest.raises(
        TransformArgumentError, match=r"the carry is returned as another SomeModule"
    ):
        nnx.while_loop(lambda m: True, lambda m: CAPTURED, SomeModule())
    with pytest.raises(TransformArgumentError, match=r"carry\['m'\] is returned as another SomeM"):
        nnx.fori_loop(0, 3, lambda i, c: {"m": CAPTURED}, {"m": SomeModule()})


TREES = {
    "vmap": lambda m: nnx.vmap(nothing, graph=False)(m, m),
    "cond": lambda m: nnx.cond(True, nothing, nothing, m, m, graph=False),
    "grad": lambda m: nnx.grad(lambda a, b: a.w.sum(), graph=False)(m, m),
    "while_loop": lambda m: nnx.while_loop(
        lambda c: True, lambda a: a, {"a": m, "b": m}, graph=False
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_have_no_aliases(name):
    m = SomeModule(stats=W)
    with pytest.raises(SharedObjectError, match="is at a") as error:
        TREES[name](m)
    assert f"nnx.{name}(" in text_of(error)
    assert re.search(
        r"is at a\S* and at (b|a\['b'\])(\.stats)?; in this mode an object is a plain",
        text_of(error),
    )


def test_filters_missing_a_variable_are_reported():
    f = nnx.vmap(lambda m: None, in_axes=(nnx.StateAxes({nnx.Param: 0}),))
    with pytest.raises(
        StateFilterError, match=r"in_axes has no filter for m\.stats, a BatchStat"
    ) as error:
        f(SomeModule(stats=W))
    assert shows_line(error, "f = nnx.vmap(")
