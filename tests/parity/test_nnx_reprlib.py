"""Texts of objects of one's own: the same programs on Flax and on Weft."""

import importlib

import jax.numpy as jnp
import pytest


def text(library, build):
    nnx = importlib.import_module(f"{library}.nnx")
    reprlib = importlib.import_module(f"{library}.nnx.reprlib")

    def representable(**options):
        parts = options.pop("parts", ())

        class Shown(reprlib.Representable):
            def __nnx_repr__(self):
                yield reprlib.Object(**{"type": type(self), **options})
                for key, value, *rest in parts:
                    yield reprlib.Attr(key, value, **(rest[0] if rest else {}))

        return Shown()

    return repr(build(representable, nnx))


def inner(representable):
    parts = [("x", 1), ("y", jnp.ones(2)), ("s", "a\nb"), ("t", int)]
    return representable(parts=[*parts, ("raw", "text", {"use_raw_value": True})])


def in_a_module(representable, nnx):
    class Model(nnx.Module):
        def __init__(self):
            self.a = nnx.data(inner(representable))

    return Model()


@pytest.mark.parametrize(
    "build",
    [
        lambda made, nnx: inner(made),
        lambda made, nnx: made(
            **{"type": "Name", "start": "[", "end": "]", "kv_sep": ": ", "indent": "    "},
            comment=" # note",
            parts=[("x", inner(made), {"start": "<", "end": ">"})],
        ),
        lambda made, nnx: made(type=dict, empty_repr="!", comment="note"),
        lambda made, nnx: made(same_line=True, parts=[("x", 1), ("y", 2)]),
        in_a_module,
    ],
    ids=["attributes", "signs", "empty", "one line", "in a module"],
)
def test_texts(build):
    assert text("weft", build) == text("flax", build)


def test_cycle():
    reprlib = importlib.import_module("weft.nnx.reprlib")

    class Loop(reprlib.Representable):
        def __nnx_repr__(self):
            yield reprlib.Object("Loop")
            yield reprlib.Attr("me", self)

    assert reprlib.get_repr(Loop()) == "Loop(\n  me=Loop(...)\n)"
