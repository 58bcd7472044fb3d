"""What does a call of a jitted step cost in Python, compared with `jax.jit` on nested dicts?

The arrays are so small that Python and the way of the arrays through JAX are what is measured: a
step that trains a chain of layers, by plain descent with 8 and 100 arrays, by Adam with 301. And
for objects, whose call is more than that of `jax.jit`, a function that changes each array and does
little else. All give away what they are given. The lower bounds are raw
JAX on slots that are read and written as objects are, and raw JAX against itself.
"""

import operator
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.harness import Row, calls, number, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.library import Library, Stateful, Step
from benchmarks.libraries.raw import RAW, chain_values

WIDTH = 4


class _Slot:
    """Holder of a value, as in an object."""

    def __init__(self, value: jax.Array):
        self.value = value


class _OnSlots:
    """The least that a call of objects is: reads slots, calls a jitted function, writes slots."""

    def __init__(self, by_hand: Stateful):
        leaves, treedef = jax.tree.flatten(by_hand.state)
        self.slots, self._x = [_Slot(leaf.copy()) for leaf in leaves], by_hand.x
        fn = by_hand.jitted.__wrapped__

        def of_leaves(leaves: list[Any], x: Any) -> tuple[list[Any], Any]:
            state, result = fn(jax.tree.unflatten(treedef, leaves), x)
            return jax.tree.leaves(state), result

        self._jitted = jax.jit(of_leaves, donate_argnums=0)

    def __call__(self) -> Any:
        leaves, result = self._jitted([slot.value for slot in self.slots], self._x)
        for slot, leaf in zip(self.slots, leaves, strict=True):
            slot.value = leaf
        return result


def _floors(question: str, by_hand: Callable[[], Any]) -> tuple[list[Row], dict[bool, str]]:
    """Returns the rows of the floor, and why objects and functions miss their targets."""
    step = _OnSlots(by_hand())
    slots = _row(f"{question}, raw JAX on slots / raw", step, by_hand())
    again = _row(f"{question}, raw JAX again / raw", by_hand(), by_hand())
    of_objects = (
        f"a Python closure that reads {len(step.slots)} slots, calls a jitted function of a flat "
        f"list and writes the slots, without any check, takes {number(slots.median)} here; "
        "Weft's call also checks whether an object has changed, and is one more Python call"
    )
    of_functions = (
        "noise: like the baseline, this is `jax.jit` on nested dicts, and no code of Weft runs in "
        f"a call (see the counts); the baseline against itself measures {number(again.median)} "
        f"here, with an interquartile range of {number(again.quartiles[0])} to "
        f"{number(again.quartiles[1])}"
    )
    return [slots, again], {True: of_objects, False: of_functions}


def _compared(
    question: str, steps: Callable[[Library], dict[str, Step]], of: Iterable[Library]
) -> list[Row]:
    rows, why = _floors(question, lambda: steps(RAW)[""])
    for library in of:
        for way, step in steps(library).items():
            name, raw = f"{question}, {library.name}{way} / raw", steps(RAW)[""]
            for _ in range(3):
                np.testing.assert_allclose(
                    step(), raw(), rtol=1e-5, err_msg=f"results differ: {name}"
                )
            rows.append(_row(name, step, raw, library, why[_has_objects(library)]))
    return rows


def _has_objects(library: Library) -> bool:
    return hasattr(library, "nnx")


def _row(
    question: str, step: Step, raw: Step, library: Library | None = None, why: str = ""
) -> Row:
    start = time.perf_counter()
    jax.block_until_ready(step())
    n = max(5, min(200, int(0.02 / (time.perf_counter() - start))))

    def many(fn: Step) -> None:
        for _ in range(n):
            result = fn()
        jax.block_until_ready(result)

    is_weft = library is not None and library.is_weft
    pairs = 25 if is_weft or library is None else 15
    quotients, *times = ratios(
        lambda: many(step), lambda: many(raw), pairs=pairs, warmup=3, clock=time.thread_time
    )
    a, b = ([x / n for x in of] for of in times)
    tenth = [statistics.quantiles(of, n=10)[0] for of in (a, b)]
    return row(
        question,
        (quotients, a, b),
        at_most=1.0 if is_weft else None,
        note=f"fastest tenth {tenth[0] / tenth[1]:.2f}; "
        f"{calls(step):.0f} against {calls(raw):.0f} Python calls",
        why=why,
    )


def run() -> list[Row]:
    """Steps of training in every library, a function that changes arrays in those of objects."""
    rows = []
    for n, tx in ((8, None), (100, None), (301, optax.adam(1e-2))):
        values = chain_values(50 if tx else n // 2, WIDTH)
        steps = operator.methodcaller("training", values, tx)
        rows += _compared(f"dispatch of a train step, {n} arrays", steps, libraries())
    for n in (8, 1000):
        values = chain_values(n // 2, WIDTH)
        steps = operator.methodcaller("shrinking", values)
        objects = filter(_has_objects, libraries())
        rows += _compared(f"dispatch of jit over {n:,} arrays", steps, objects)
    return rows
