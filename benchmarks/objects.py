"""What do attributes and variables cost, compared with plain Python?

A plain class has its attributes, and a box with `__getitem__` and `__setitem__` in Python for what
a variable is read and written by.
"""

import time

import jax.numpy as jnp

from benchmarks.harness import Row, calls, ratios, row
from benchmarks.libraries import nnx_modules

TIMES = 2000


class _Plain:
    pass


class _Box:
    def __init__(self, value):
        self._value = value

    def __getitem__(self, index):
        return self._value

    def __setitem__(self, index, value):
        self._value = value


def _row(question, fn, plain, at_most) -> Row:
    def many(fn):
        def run():
            for _ in range(TIMES):
                fn()

        return run

    measured = ratios(many(fn), many(plain), pairs=25, warmup=2, clock=time.thread_time)
    quotients, *times = measured
    a, b = ([x / TIMES for x in of] for of in times)
    return row(question, (quotients, a, b), at_most=at_most, note=f"{calls(fn):.0f} Python calls")


def _of(library, nnx, is_weft) -> list[Row]:
    array = jnp.ones((4, 4))

    class Model(nnx.Module):
        def __init__(self):
            self.w, self.n, self.name = nnx.Param(array), 1, "a"

    model, plain, box = Model(), _Plain(), _Box(array)
    plain.n, plain.name, variable = 1, "a", model.w

    def write_variable():
        variable[...] = array

    def write_box():
        box[...] = array

    def write_attribute():
        model.name = "b"

    def write_plain():
        plain.name = "b"

    assert variable[...] is box[...]
    questions = {
        "read an attribute of a module": (lambda: model.n, lambda: plain.n, 2),
        "write an attribute of a module": (write_attribute, write_plain, None),
        "read a variable": (lambda: variable[...], lambda: box[...], 3),
        "write a variable": (write_variable, write_box, None),
    }
    return [
        _row(f"{question}, {library} / plain Python", fn, plain, at_most if is_weft else None)
        for question, (fn, plain, at_most) in questions.items()
    ]


def run() -> list[Row]:
    """Reads and writes, of modules and of variables."""
    libs = nnx_modules()
    return [r for name, nnx in libs.items() for r in _of(name, nnx, name.startswith("Weft"))]
