"""Errors inside of lifted scopes name state by its full path, from the root on."""

import jax
import jax.numpy as jnp
import pytest

from weft.core import apply, init, lift
from weft.core.meta import PARTITION_NAME, Partitioned
from weft.errors import (
    AxisSizeError,
    BranchStructureError,
    CarryStructureError,
    PartitionNameError,
    RoleError,
    VariableAxisError,
)

ZERO = jnp.zeros(())
OPTIONS = {
    "variable_axes": {True: 0},
    "split_rngs": {True: True},
    "metadata_params": {PARTITION_NAME: None},
}


def directly(fn, scope):
    return fn(scope)


def jitted(fn, scope):
    return lift.jit(fn)(scope)


def in_remat(fn, scope):
    return lift.remat(fn)(scope)


def mapped(fn, scope):
    return lift.vmap(fn, axis_size=2, **OPTIONS)(scope)


def mapped_and_scanned(fn, scope):
    def body(scope, carry, _):
        return carry, mapped(fn, scope)

    return lift.scan(body, length=2, **OPTIONS)(scope, 0.0, None)


def writes(change):
    def write(scope, x=0.0):
        n = scope.push("cell").variable("st", "n", lambda: ZERO)
        n.value = change(n.value, x)
        return x

    return write


def body_of(change):
    write = writes(change)
    return lambda scope, c, _: (write(scope, c), None)


def shares(scope):
    return lift.scan(body_of(jnp.add), variable_broadcast="st", length=3)(scope, 1.0, None)


def grows(scope):
    body = body_of(lambda n, c: jnp.stack([n, n]))
    return lift.scan(body, variable_carry="st", length=3)(scope, 1.0, None)


def nests(scope):
    body = body_of(lambda n, c: {"more": n})
    return lift.scan(body, variable_carry="st", length=3)(scope, 1.0, None)


def differs(scope):
    return lift.vmap(writes(lambda n, x: n + x), variable_axes={"st": None}, split_rngs={})(
        scope, jnp.ones(3)
    )


def branches(scope):
    ways = writes(lambda n, x: jnp.ones(2)), writes(lambda n, x: jnp.ones(3))
    return lift.cond(True, *ways, scope)


def has_no_axis(scope):
    return lift.vmap(writes(lambda n, x: n), variable_axes={"st": 4}, split_rngs={})(
        scope, jnp.ones(3)
    )


FAILURES = [
    (shares, RoleError),
    (grows, CarryStructureError),
    (nests, CarryStructureError),
    (differs, VariableAxisError),
    (branches, BranchStructureError),
    (has_no_axis, AxisSizeError),
]


@pytest.mark.parametrize("around", [directly, jitted, in_remat, mapped, mapped_and_scanned])
@pytest.mark.parametrize(("fails", "error"), FAILURES)
def test_errors_about_variables_name_the_full_path(around, fails, error):
    shape = {mapped: (2,), mapped_and_scanned: (2, 2)}.get(around, ())
    variables = {"st": {"outer": {"inner": {"cell": {"n": jnp.zeros(shape)}}}}}

    def model(scope):
        return around(lambda s: fails(s.push("inner")), scope.push("outer"))

    with pytest.raises(error, match=r"'st/outer/inner/cell/n(/more)?'"):
        apply(model, mutable=["st"])(variables)


@pytest.mark.parametrize("around", [directly, jitted, in_remat, mapped, mapped_and_scanned])
@pytest.mark.parametrize("transformation", ["scan", "vmap"])
def test_errors_about_names_of_axes_name_the_full_path(around, transformation):
    def cell(scope, c, _):
        boxed = lambda key: Partitioned(jnp.ones(2), ("data",))  # noqa: E731
        scope.push("cell").param("w", boxed)
        return c, None

    def model(name):
        def layers(scope):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            named = {"metadata_params": {"partition_name": name}}
            if transformation == "vmap":
                return lift.vmap(cell, **axes, **named, axis_size=3, in_axes=None)(scope, 0, None)
            return lift.scan(cell, **axes, **named, length=3)(scope, 0.0, None)

        return lambda scope: around(lambda s: layers(s.push("inner")), scope.push("outer"))

    _, variables = init(model("layers"))(jax.random.key(0))
    with pytest.raises(PartitionNameError) as caught:
        apply(model("stages"))(variables)
    assert caught.value.path == "params/outer/inner/cell/w"


def test_each_of_several_scopes_is_named_by_its_own_path():
    def both(scopes, x):
        first, second = scopes
        first.variable("st", "n", lambda: ZERO)
        second.variable("st", "n", lambda: ZERO).value = x
        return x

    def model(scope):
        scopes = scope.push("a"), scope.push("b")
        return lift.vmap(both, variable_axes={"st": None}, split_rngs={})(scopes, jnp.ones(3))

    with pytest.raises(VariableAxisError, match="'st/b/n'"):
        apply(model, mutable=["st"])({})
