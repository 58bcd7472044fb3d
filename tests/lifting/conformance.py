"""The checks of a kind under every transformation of `weft.lifting`.

A step reads the array `w` of a carrier and adds to `total`. Under each transformation it returns,
writes and differentiates to the same as without one. A new kind describes its carriers by
`Carriers` and runs `CHECKS` on each transformation of `AROUND`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft import lifting
from weft.lifting import CARRY, DIFF, Kind, Roles

W, TOTAL, X = jnp.float32(0.5), jnp.float32(2), jnp.float32(3)


@dataclasses.dataclass(frozen=True)
class Carriers:
    """The carriers of a kind.

    Attributes:
        make: makes a carrier of arrays by name.
        read, write: get and set an array of a carrier by its name.
        where: returns the filter of the array with a name.
    """

    kind: Kind
    make: Callable[[dict[str, Any]], Any]
    read: Callable[[Any, str], Any]
    write: Callable[[Any, str, Any], None]
    where: Callable[[str], Any] = lambda name: name

    def step(self, carrier: Any, x: Any) -> Any:
        w = self.read(carrier, "w")
        self.write(carrier, "total", self.read(carrier, "total") + w * x)
        return jnp.sin(w * x)

    def roles(self, w: Any, total: Any) -> Roles:
        return Roles(((self.where("w"), w), (self.where("total"), total)))

    def run(self, around: Callable[..., Any], w: Any, fn: Any = None) -> tuple[Any, Any]:
        """Returns the result of the step in a transformation, and `total` after it."""
        carrier = self.make({"w": w, "total": TOTAL})
        y = around(self, fn or self.step, carrier, X)
        return y, self.read(carrier, "total")


def plain(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    return fn(carrier, x)


def _loop(c: Carriers, fn: Any, carrier: Any, x: Any, lift: Callable[..., Any]) -> Any:
    roles = (c.roles(None, CARRY), None, CARRY)
    return lift(lambda carrier, x, y: fn(carrier, x), in_axes=roles)(carrier, x, 0 * x)


def _while_loop(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    loop = lifting.while_loop(
        c.kind,
        lambda carrier, x, n, y: n < 1,
        lambda carrier, x, n, y: (n + 1, fn(carrier, x)),
        in_axes=(c.roles(None, CARRY), None, CARRY, CARRY),
    )
    return loop(carrier, x, 0, 0 * x)[1]


def _scan(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    roles = (c.roles(None, CARRY), 0)
    return lifting.scan(c.kind, fn, in_axes=roles, out_axes=0)(carrier, x[None])[0]


def _mapped(c: Carriers, carrier: Any, lifted: Callable[..., Any], x: Any) -> Any:
    """Calls a function whose `total` has an axis."""
    c.write(carrier, "total", c.read(carrier, "total")[None])
    y = lifted(carrier, x[None])[0]
    c.write(carrier, "total", c.read(carrier, "total")[0])
    return y


def _vmap(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    lifted = lifting.vmap(c.kind, fn, in_axes=(c.roles(None, 0), 0))
    return _mapped(c, carrier, lifted, x)


def _pmap(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    lifted = lifting.pmap(c.kind, fn, in_axes=(c.roles(None, 0), 0))
    return _mapped(c, carrier, lifted, x)


def _shard_map(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    mesh, whole = Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec()
    lifted = lifting.shard_map(
        c.kind, fn, mesh=mesh, in_specs=(c.roles(whole, whole), whole), out_specs=whole
    )
    return lifted(carrier, x)


def _custom_vjp(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    def forward(carrier: Any, x: Any) -> Any:
        y, pullback = lifting.vjp(c.kind, fn, wrt=(c.roles(DIFF, None), DIFF))(carrier, x)
        return y, pullback

    def backward(pullback: Any, cotangent: Any) -> Any:
        (of_w, _), of_x = pullback(cotangent)
        return [of_w, of_x]

    wrt = (c.roles(DIFF, None), DIFF)
    return lifting.custom_vjp(c.kind, fn, forward, backward, wrt=wrt)(carrier, x)


def _custom_jvp(c: Carriers, fn: Any, carrier: Any, x: Any) -> Any:
    wrt = (c.roles(DIFF, None), DIFF)

    def rule(tangents: Any, carrier: Any, x: Any) -> Any:
        return lifting.jvp(c.kind, fn, wrt=wrt)((carrier, x), tangents)

    return lifting.custom_jvp(c.kind, fn, rule, wrt=wrt)(carrier, x)


# Each returns fn(carrier, x).
AROUND: dict[str, Callable[..., Any]] = {
    "jit": lambda c, fn, carrier, x: lifting.jit(c.kind, fn)(carrier, x),
    "remat": lambda c, fn, carrier, x: lifting.remat(c.kind, fn)(carrier, x),
    "checkify": lambda c, fn, carrier, x: lifting.checkify(c.kind, fn)(carrier, x)[1],
    "map_state": lambda c, fn, carrier, x: lifting.map_state(
        c.kind, fn, map_out=lambda found, left, _: left
    )(carrier, x),
    "grad": lambda c, fn, carrier, x: lifting.grad(
        c.kind, lambda carrier, x: 2 * (fn(carrier, x),), wrt=(None, DIFF), has_aux=True
    )(carrier, x)[1],
    "vjp": lambda c, fn, carrier, x: lifting.vjp(c.kind, fn, wrt=(c.roles(DIFF, None), DIFF))(
        carrier, x
    )[0],
    "jvp": lambda c, fn, carrier, x: lifting.jvp(c.kind, fn, wrt=(None, DIFF))((carrier, x), [x])[
        0
    ],
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "cond": lambda c, fn, carrier, x: lifting.cond(c.kind, fn, lambda carrier, x: 0 * x)(
        x > 0, carrier, x
    ),
    "switch": lambda c, fn, carrier, x: lifting.switch(c.kind, [lambda carrier, x: 0 * x, fn])(
        x.astype(int), carrier, x
    ),
    "scan": _scan,
    "while_loop": _while_loop,
    "fori_loop": lambda c, fn, carrier, x: lifting.fori_loop(
        c.kind,
        0,
        1,
        lambda i, carrier, x, y: fn(carrier, x),
        in_axes=(c.roles(None, CARRY), None, CARRY),
    )(carrier, x, 0 * x),
    "vmap": _vmap,
    "pmap": _pmap,
    "shard_map": _shard_map,
}


def check_values(c: Carriers, name: str) -> None:
    """Checks the result, and what is written."""
    with jax.checking_leaks():
        np.testing.assert_allclose(c.run(AROUND[name], W), (jnp.sin(W * X), TOTAL + W * X))


def check_failure(c: Carriers, name: str) -> None:
    """Checks that a function that fails after a write leaves the carrier as it was."""

    def failing(carrier: Any, x: Any) -> Any:
        c.step(carrier, x)
        raise KeyError("inside")

    carrier = c.make({"w": W, "total": TOTAL})
    with pytest.raises(KeyError, match="inside"):
        AROUND[name](c, failing, carrier, X)
    assert np.all(c.read(carrier, "total") == TOTAL)


def check_derivatives(c: Carriers, name: str) -> None:
    """Checks derivatives of the result and of what is written, with respect to the state."""
    # The derivative of what a function with a rule writes is that of the rule.
    of_total = 0 if name in ("custom_vjp", "custom_jvp") else 10

    def both(w: Any) -> Any:
        y, total = c.run(AROUND[name], w)
        return y + of_total * total

    expected = X * jnp.cos(W * X) + of_total * X
    if name != "custom_vjp":  # JAX has no forward derivative of it
        np.testing.assert_allclose(jax.jvp(both, (W,), (W / W,))[1], expected, rtol=1e-5)
    if name != "while_loop":  # nor a reverse one of this
        np.testing.assert_allclose(jax.grad(both)(W), expected, rtol=1e-5)


def check_nesting(c: Carriers, name: str) -> None:
    """Checks the transformation inside of some others."""
    for outer in ("jit", "vmap", "scan", "remat", "cond"):

        def nested(c: Carriers, fn: Any, carrier: Any, x: Any, outer: str = outer) -> Any:
            inside = lambda carrier, x: AROUND[name](c, fn, carrier, x)  # noqa: E731
            return AROUND[outer](c, inside, carrier, x)

        np.testing.assert_allclose(c.run(nested, W), (jnp.sin(W * X), TOTAL + W * X), rtol=1e-6)


CHECKS = {
    check.__name__: check
    for check in (check_values, check_failure, check_derivatives, check_nesting)
}


def check_compiled_once(c: Carriers) -> None:
    """Checks that carriers of equal structure share a compiled function."""
    traces = []

    def counted(carrier: Any, x: Any) -> Any:
        traces.append(1)
        return c.step(carrier, x)

    compiled = lifting.jit(c.kind, counted)
    for w in (W, 2 * W):
        carrier = c.make({"w": w, "total": TOTAL})
        np.testing.assert_allclose(compiled(carrier, X), jnp.sin(w * X))
    assert len(traces) == 1
