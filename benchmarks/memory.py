"""How much memory does a step take, and how much of the state lies on each of several devices?

What the compiler says of compiled steps, and what devices hold; nothing here is a time.
"""

import dataclasses
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _devices, _raw_lm
from benchmarks.harness import Row, counted
from benchmarks.libraries import libraries
from benchmarks.libraries.library import chain_input, updated
from benchmarks.libraries.raw import RAW, chain_values
from weft.recipes import RECIPES

LAYERS, DIM = 7, 768  # 50M parameters
_VALUES = chain_values(8, 256)


@dataclasses.dataclass(frozen=True)
class _Memory:
    arguments: int
    peak: int


def _memory(compiled: Any) -> _Memory:
    """Returns the memory of a compiled step: its inputs, and the total with outputs and
    temporaries.
    """
    of = compiled.memory_analysis()
    new = of.output_size_in_bytes - of.alias_size_in_bytes
    given = of.argument_size_in_bytes
    return _Memory(given, given + new + of.temp_size_in_bytes)


def _of_trainer() -> Row:
    """Returns the step that the default trainer compiles, by that by hand (see `throughput` for
    losses).
    """
    with tempfile.TemporaryDirectory() as directory:
        cfg = RECIPES[0]().set(dir=directory, evalers={})
        cfg.model.decoder.set(dim=DIM)
        cfg.model.decoder.transformer.num_layers = LAYERS
        cfg.model.decoder.transformer.layer.self_attention.attention.num_heads = 12
        trainer = cfg.instantiate(parent=None)
        step = _memory(trainer.compile_train_step())

        def as_shapes(tree):
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

        params = _raw_lm.from_weft(as_shapes(trainer.trainer_state_specs.model))
        batch = as_shapes(trainer.input.element_spec())
    optimizer, by_hand = _raw_lm.make_step(1e-3, 100)
    state = jax.eval_shape(optimizer.init, params)
    raw = _memory(by_hand.lower(params, state, batch).compile())
    number = sum(x.size for x in jax.tree.leaves(params))
    return counted(
        f"peak memory of a step of {number / 1e6:.0f}M parameters, the default trainer / raw",
        step.peak / raw.peak,
        at_most=1.02,
        note=f"{step.peak / 1e6:,.0f} against {raw.peak / 1e6:,.0f} MB",
    )


def _live() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def _training(library: Any) -> tuple[float, float]:
    """Returns the peak memory of a step that gives away its model, by that by hand; what stays
    alive.
    """
    nnx, tx, x = library.nnx, optax.adam(1e-3), chain_input(_VALUES)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def raw(both: Any, x: Any) -> Any:
        params, state = both
        apply = RAW.chain(_VALUES).make()
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(apply(p, x) ** 2))(params)
        return updated(tx, params, grads, state), loss

    model = library.chain(_VALUES).params
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step, by_hand = nnx.jit(step, donate_argnums=(0, 1)), jax.jit(raw, donate_argnums=0)
    params = jax.tree.map(jnp.copy, _VALUES)
    both = (params, tx.init(params))
    peaks = [
        _memory(lowered.compile()).peak
        for lowered in (step.lower(model, optimizer, x), by_hand.lower(both, x))
    ]
    before = _live()
    for _ in range(2):
        loss, (both, of_raw) = step(model, optimizer, x), by_hand(both, x)
        np.testing.assert_allclose(loss, of_raw, rtol=1e-4, err_msg=library.name)
    del loss, of_raw
    return peaks[0] / peaks[1], _live() / before


def _unchanged(library: Any) -> float:
    """Returns the memory of a call that changes one count and gives away nothing, by that of the
    model.
    """
    nnx, model = library.nnx, library.chain(_VALUES).params
    model.count = nnx.data(nnx.Variable(jnp.array(0)))

    def call(model: Any, x: Any) -> Any:
        model.count[...] += 1
        return model(x)

    memory = _memory(nnx.jit(call).lower(model, chain_input(_VALUES)).compile())
    return memory.peak / memory.arguments


def _of_objects() -> list[Row]:
    rows = []
    for library in libraries():
        if hasattr(library, "nnx"):
            peak, live = _training(library)
            for question, value, at_most in (
                ("peak memory of a donated step of Adam / raw", peak, 1.02),
                ("arrays alive after it / before", live, 1.0),
                (
                    "peak memory of a call that changes a count / arguments",
                    _unchanged(library),
                    1.05,
                ),
            ):
                what, _, base = question.partition(" / ")
                rows.append(
                    counted(
                        f"{what}, {library.name} / {base}",
                        value,
                        at_most=at_most if library.is_weft else None,
                    )
                )
    return rows


def _of_devices() -> list[Row]:
    found = _devices.asked("shards")
    held = {int(n): size for n, size in found["bytes"].items()}
    rows = [
        counted(
            f"parameters and optimizer state per device under FSDP on {n} / a part of {n}",
            size / (held[1] / n),
            at_most=1.01,
            note=f"{size:,} bytes",
        )
        for n, size in held.items()
        if n > 1
    ]
    rows.append(
        counted(
            "parameters of a stack that FSDP gathers other than one layer at a time, of "
            f"{found['params']}",
            found["params"] - found["one"] + found["all"],
            at_most=0,
        )
    )
    return rows


def run() -> list[Row]:
    """Measures a step of the trainer, steps of objects, and several devices."""
    return [_of_trainer(), *_of_objects(), *_of_devices()]
