import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.linen.modules import KEY, Affine, X
from tests.linen.transformed import ALL
from weft import linen as nn
from weft import struct
from weft.errors import NameInUseError
from weft.linen.methods import compact
from weft.linen.module import Module, map_submodules

# Names in transformations: the same names are allowed inside and outside.

SHARED = {
    "variable_broadcast": "params",
    "variable_carry": "state",
    "split_rngs": {"params": False},
}
MAPPED = {"variable_axes": {"params": None, "state": None}, "split_rngs": {"params": False}}
LIFTS = ALL | {
    "vmap": functools.partial(nn.vmap, **MAPPED),
    "pmap": functools.partial(nn.pmap, **MAPPED),
    "scan": lambda f: (
        lambda m, x: nn.scan(lambda m, x, _: (f(m, x), None), length=1, **SHARED)(m, x, None)[0]
    ),
    "while_loop": lambda f: (
        lambda m, x: nn.while_loop(
            lambda m, x: False, f, m, x, carry_variables="state", split_rngs={"params": False}
        )
    ),
    "cond": lambda f: lambda m, x: nn.cond(True, f, f, m, x),
    "switch": lambda f: lambda m, x: nn.switch(0, [f, f], m, x),
    "vjp": lambda f: lambda m, x: nn.vjp(f, m, x)[0],
    "jvp": lambda f: lambda m, x: nn.jvp(f, m, (x,), (x,), {})[0],
    "grad": lambda f: lambda m, x: nn.grad(lambda m, x: f(m, x).sum(), m, x)[0],
    "custom_vjp": lambda f: nn.custom_vjp(f, lambda m, x: nn.vjp(f, m, x), lambda pull, g: pull(g)),
    "jit in jit": lambda f: nn.jit(nn.jit(f)),
}
MADE = {
    "submodule": lambda m, x: Affine(name="a")(x),
    "parameter": lambda m, x: x + m.param("a", nn.initializers.ones, ()),
    "variable": lambda m, x: x + m.variable("state", "a", jnp.zeros, ()).value,
    "another": lambda m, x: Affine(name="b")(x),
    "own": lambda m, x: m.a(x) if callable(m.a) else x,
}


class InSetup(Module):
    kind: str
    body: Any

    def setup(self):
        if self.kind == "submodule":
            self.a = Affine()
        elif self.kind == "parameter":
            self.a = self.param("a", nn.initializers.ones, ())
        else:
            self.a = self.variable("state", "a", jnp.zeros, ())

    @compact
    def __call__(self, x):
        return self.body(self, x)


class InField(Module):
    a: Module
    body: Any

    @compact
    def __call__(self, x):
        return self.body(self, x)


def outcome(make, body):
    try:
        return jax.eval_shape(make(body).init, KEY, X)
    except NameInUseError:
        return "the name is in use"


OUTSIDE = {}  # what happens without a transformation, once it is known


@pytest.mark.parametrize("lift", LIFTS)
def test_name_taken_outside_is_rejected_in_a_transform(lift):
    lifted = LIFTS[lift]
    kinds = {
        kind: functools.partial(InSetup, kind) for kind in ("submodule", "parameter", "variable")
    }
    for kind, make in {**kinds, "field": functools.partial(InField, Affine())}.items():
        for made, body in MADE.items():
            if (kind, made) not in OUTSIDE:
                OUTSIDE[kind, made] = outcome(make, body)
            assert outcome(make, lifted(body)) == OUTSIDE[kind, made], (kind, made)


def test_jitted_method_cannot_reuse_setup_names():
    class Model(Module):
        def setup(self):
            self.a = Affine()

        @nn.jit
        @compact
        def __call__(self, x):
            return Affine(name="a")(self.a(x))

    with pytest.raises(NameInUseError, match="'a' is used twice in 'Model"):
        Model().init(KEY, X)


@struct.dataclass
class Box:
    """Its fields are in another order than their names."""

    b: Any
    a: Any = None
    kept: Any = struct.field(pytree_node=False, default="text")


def test_only_children_of_a_struct_are_submodules():
    box = Box(1, kept=nn.Dense(2))
    assert map_submodules(lambda at, x: x, box, lambda x: isinstance(x, Module)) is box


def test_lifted_function_captures_modules_in_a_struct():
    class Lifted(Module):
        box: Any

        @compact
        def __call__(self, x):
            box = self.box
            return nn.vmap(
                lambda _, x: box.b(x), variable_axes={"params": None}, split_rngs={"params": False}
            )(self, x)

    y, variables = Lifted(Box(nn.Dense(2))).init_with_output(KEY, X)
    np.testing.assert_allclose(y, nn.Dense(2).apply({"params": variables["params"]["box_b"]}, X))
