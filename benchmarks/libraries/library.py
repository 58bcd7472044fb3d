"""Interface of a measured library, and a training step of those with external parameters."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

RATE = 1e-2

Values = dict[str, Any]
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A model as a function of parameters and an input.

    Attributes:
        make: creates a new function, unknown to every cache.
        params: what it is called with.
        jit: under which it is traced.
    """

    make: Callable[[], Callable[[Any, Any], Any]]
    params: Any
    jit: Callable[..., Any] = jax.jit

    def __call__(self, x: Any) -> Any:
        return self.make()(self.params, x)

    def trace(self, x: Any) -> Any:
        """Traces a new function, whose closure equals nothing that was traced before."""
        fn, new = self.make(), object()

        def called(params: Any, x: Any) -> Any:
            assert new is not None
            return fn(params, x)

        return self.jit(called).trace(self.params, x)


class Library:
    """One of the libraries, or one of Weft's ways of writing.

    Attributes:
        name: name in the table.
    """

    name: str

    @property
    def is_weft(self) -> bool:
        """Whether it is judged."""
        return self.name.startswith("Weft")

    def unrolled(self, values: Values) -> Program | None:
        """Returns the decoder, layer by layer."""

    def jitted(self, values: Values) -> Program | None:
        """Returns the same with each block under its own jit."""

    def scanned(self, values: Values) -> Program | None:
        """Returns the decoder as a scan over layers."""

    def nested(self, values: Values) -> Program | None:
        """Returns vmap(scan(remat(block))): a scanned decoder over a leading axis of the input."""

    def transformed(self, values: Values, kinds: Sequence[str]) -> Program | None:
        """Returns one block in transformations, "vmap", "scan" (without a carry) or "remat".

        The last is the outermost. Of the first two each maps over a leading axis of the input.
        """

    def shapes(self, n: int) -> Callable[[], Any] | None:
        """Makes the shapes of a decoder's parameters, without values."""

    def chain(self, values: Values) -> Program | None:
        """Returns linear layers with a tanh after each."""

    def shrinking(self, values: Values, plain: bool = False) -> dict[str, Step]:
        """By way of calling: multiplies each array of a chain, given away, by 0.999.

        With `plain` the way "" alone.
        """
        program = self.chain(values)
        if program is None:
            return {}
        jitted = jax.jit(shrink, donate_argnums=0)
        return {"": Stateful(jitted, program.params, jnp.ones(()))}

    def training(self, values: Values, tx: Any) -> dict[str, Step]:
        """By way of calling: a step that trains a chain, by `tx` or else by plain descent.

        It gives away what it is given, and returns the loss.
        """
        program = self.chain(values)
        return {} if program is None else {"": training_step(program, tx)}


class Stateful:
    """A jitted function (state, x) -> (state, result), which keeps its state."""

    def __init__(self, jitted: Callable[..., Any], state: Any, x: Any):
        self.jitted, self.state, self.x = jitted, jax.tree.map(jnp.array, state), x

    def __call__(self) -> Any:
        self.state, result = self.jitted(self.state, self.x)
        return result


def chain_input(values: Values) -> Any:
    """Returns the input of a chain."""
    return jnp.ones((2, next(iter(values.values()))["kernel"].shape[0]))


def shrink(params: Any, x: Any) -> tuple[Any, Any]:
    """Changes every array, and does little else."""
    return jax.tree.map(lambda p: p * 0.999, params), x + 1


def updated(tx: Any, params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and the optimizer's state after a step."""
    if tx is None:
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), state
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def training_step(program: Program, tx: Any) -> Step:
    """Returns a step of a model whose parameters are a pytree of arrays."""
    apply = program.make()

    def step(both: Any, x: Any) -> Any:
        params, state = both
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
        return updated(tx, params, grads, state), loss

    params = program.params
    state = () if tx is None else tx.init(params)
    width = next(x.shape[0] for x in jax.tree.leaves(params) if x.ndim == 2)
    return Stateful(jax.jit(step, donate_argnums=0), (params, state), jnp.ones((2, width)))


def renamed(values: Values, names: dict[str, str]) -> Values:
    """Returns nested dicts with other names of the leaves."""
    return {
        names.get(k, k): renamed(v, names) if isinstance(v, dict) else v for k, v in values.items()
    }
