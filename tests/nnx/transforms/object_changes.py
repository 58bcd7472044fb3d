"""Models, and what can be changed in them between two calls."""

import collections
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from weft import nnx, struct


class Pair(NamedTuple):
    a: Any
    b: Any


@struct.dataclass
class Box:
    x: Any
    name: str = struct.field(pytree_node=False, default="box")


@dataclasses.dataclass
class Config:
    scale: float
    names: list[str] = dataclasses.field(default_factory=list)


class Layer(nnx.Module):
    def __init__(self, w=1.0):
        self.w = nnx.Param(jnp.float32(w))
        self.deterministic = False


class Model(nnx.Module):
    def __init__(self):
        self.a, self.b = Layer(1.0), Layer(2.0)
        self.w = nnx.Param(jnp.arange(2.0), tag="a")
        self.count = nnx.BatchStat(jnp.array(1))
        self.layers = [Layer(3.0), Layer(4.0)]
        self.heads = {"b": nnx.Param(jnp.float32(5.0)), "a": Layer(6.0)}
        self.nested = ({"deep": [Layer(7.0), 1]}, nnx.Param(jnp.float32(8.0)))
        self.scale = 1.0
        self.name = "model"


class WithArrays(Model):
    """One that is looked at in every call."""

    def __init__(self):
        super().__init__()
        self.buffer = jnp.ones(2)
        self.numpy = np.ones(3, np.float32)
        self.count_of = nnx.data(jnp.array(3))
        self.config = Config(1.0, ["a"])
        self.space = types.SimpleNamespace(k=1)
        self.queue = collections.deque([1, 2])
        self.pair = Pair(nnx.Param(jnp.float32(1.0)), [jnp.ones(1)])
        self.box = Box(jnp.ones(2))
        self.ordered = collections.OrderedDict(b=jnp.ones(1), a=1)
        self.sizes = nnx.static([1, object])


class Other(Model):
    pass


def swap(m):
    m.a, m.b = m.b, m.a


def swap_variables(m):
    m.a.w, m.b.w = m.b.w, m.a.w


def keep_id(m):
    """Replaces a deleted layer by a new one, most likely at the same address."""
    del m.a
    m.a = Layer(9.0)


def hooked(v, x):
    return x + 1


CHANGES = {
    "a static value": lambda m: setattr(m, "scale", 2.0),
    "another type of number": lambda m: setattr(m, "scale", 1),
    "a bool for a number": lambda m: setattr(m, "scale", True),
    "minus zero": lambda m: (setattr(m, "scale", 0.0), setattr(m, "scale", -0.0)),
    "a text": lambda m: setattr(m, "name", "other"),
    "a new attribute": lambda m: setattr(m, "new", 1),
    "a new variable": lambda m: setattr(m, "new", nnx.Cache(jnp.ones(1))),
    "an attribute deleted": lambda m: delattr(m, "name"),
    "a variable deleted": lambda m: delattr(m, "w"),
    "deleted and set again": lambda m: (delattr(m, "scale"), setattr(m, "scale", 3.0)),
    "a module for a value": lambda m: setattr(m, "scale", Layer()),
    "a value for a module": lambda m: setattr(m, "a", 1.0),
    "None for a variable": lambda m: setattr(m, "w", None),
    "another variable": lambda m: setattr(m, "w", nnx.Param(jnp.zeros(2))),
    "a variable of another kind": lambda m: setattr(m, "w", nnx.BatchStat(jnp.zeros(2))),
    "another module": lambda m: setattr(m, "a", Layer(9.0)),
    "another class of module": lambda m: setattr(m, "a", Other()),
    "its own class": lambda m: setattr(m, "__class__", Other),
    "a module at the same address": keep_id,
    "an alias of a module": lambda m: setattr(m, "b", m.a),
    "an alias of a variable": lambda m: setattr(m.b, "w", m.a.w),
    "an alias in a list": lambda m: m.layers.append(m.a),
    "an alias that ends": lambda m: (setattr(m, "b", m.a), setattr(m, "b", Layer())),
    "a cycle": lambda m: setattr(m, "me", m),
    "modules swapped": swap,
    "variables swapped": swap_variables,
    "a value": lambda m: m.w.set_value(jnp.ones(2)),
    "a part of a value": lambda m: m.w.__setitem__(0, 5.0),
    "another shape": lambda m: m.w.set_value(jnp.ones((3, 1))),
    "another dtype": lambda m: m.w.set_value(jnp.ones(2, jnp.int32)),
    "a number as value": lambda m: m.w.set_value(1.0),
    "a pytree as value": lambda m: m.w.set_value({"b": jnp.ones(1), "a": (2.0, None)}),
    "None as value": lambda m: m.w.set_value(None),
    "a value of numpy": lambda m: m.w.set_value(np.ones(2, np.float32)),
    "a value that was another's": lambda m: m.a.w.set_value(m.b.w.get_value()),
    "metadata": lambda m: m.w.set_metadata(tag="b"),
    "new metadata": lambda m: m.w.set_metadata(more=(1, 2)),
    "metadata deleted": lambda m: m.w.del_metadata("tag"),
    "all metadata": lambda m: m.w.set_metadata({"x": 1}),
    "a list as metadata": lambda m: m.w.set_metadata(xs=[1, 2]),
    "a hook": lambda m: m.w.set_metadata(on_get_value=hooked),
    "a hook for writes": lambda m: m.w.set_metadata(on_set_value=hooked),
    "a variable that stays": lambda m: m.w.set_metadata(mutable=False),
    "a mark as data": lambda m: setattr(m, "scale", nnx.data(4.0)),
    "a mark as static": lambda m: setattr(m, "scale", nnx.static(5.0)),
    "data, then static": lambda m: (
        setattr(m, "scale", nnx.data(4.0)),
        setattr(m, "scale", nnx.static(4.0)),
    ),
    "an array": lambda m: setattr(m, "scale", jnp.ones(2)),
    "an array of numpy": lambda m: setattr(m, "scale", np.ones(2, np.float32)),
    "a function": lambda m: setattr(m, "name", lambda x: x + 1),
    "a closure": lambda m: setattr(m, "name", (lambda k: lambda x: x * k)(3.0)),
    "a partial": lambda m: setattr(m, "name", functools.partial(pow, 2.0)),
    "append": lambda m: m.layers.append(Layer(8.0)),
    "extend": lambda m: m.layers.extend([1, nnx.Param(jnp.float32(1.0))]),
    "insert": lambda m: m.layers.insert(0, Layer(8.0)),
    "pop": lambda m: m.layers.pop(0),
    "remove": lambda m: m.layers.remove(m.layers[1]),
    "reverse": lambda m: m.layers.reverse(),
    "sort": lambda m: m.layers.sort(key=lambda x: -x.w.ndim),
    "an item": lambda m: m.layers.__setitem__(0, Layer(8.0)),
    "a negative item": lambda m: m.layers.__setitem__(-1, Layer(8.0)),
    "a slice": lambda m: m.layers.__setitem__(slice(0, 1), []),
    "an item deleted": lambda m: m.layers.__delitem__(0),
    "clear": lambda m: m.layers.clear(),
    "+=": lambda m: m.layers.__iadd__([Layer(1.0)]),
    "*=": lambda m: m.layers.__imul__(2),
    "a list for a list": lambda m: setattr(m, "layers", [Layer()]),
    "an attribute of a list": lambda m: setattr(m.layers, "kind", "dense"),
    "a key": lambda m: m.heads.__setitem__("c", Layer(1.0)),
    "a key as attribute": lambda m: setattr(m.heads, "c", 1),
    "a key deleted": lambda m: m.heads.__delitem__("a"),
    "dict.pop": lambda m: m.heads.pop("b"),
    "popitem": lambda m: m.heads.popitem(),
    "setdefault": lambda m: m.heads.setdefault("c", 2),
    "update": lambda m: m.heads.update(a=1, c=Layer()),
    "|=": lambda m: m.heads.__ior__({"c": 1}),
    "dict.clear": lambda m: m.heads.clear(),
    "another order of keys": lambda m: m.heads.__setitem__("b", m.heads.pop("b")),
    "deep inside": lambda m: m.nested[0]["deep"].append(2),
    "deeper": lambda m: setattr(m.nested[0]["deep"][0], "w", nnx.Param(jnp.ones(2))),
    "eval": lambda m: m.eval(),
    "train after eval": lambda m: (m.eval(), m.train()),
    "attributes of all": lambda m: m.set_attributes(deterministic=1),
    "sow": lambda m: m.sow(nnx.Intermediate, "h", jnp.ones(1)),
    "variables taken out": lambda m: nnx.pop(m, nnx.BatchStat),
    "a state": lambda m: nnx.update(m, {"w": jnp.zeros(2), "heads": {"b": jnp.float32(0)}}),
    "a state with metadata": lambda m: nnx.update(m, {"w": nnx.Param(jnp.ones(2), tag="c")}),
    "copied from another": lambda m: m.w.copy_from(nnx.Param(jnp.zeros(2), more=1)),
}
ARRAYS = {
    "another array": lambda m: setattr(m, "buffer", jnp.zeros(2)),
    "an array of another shape": lambda m: setattr(m, "buffer", jnp.zeros((2, 2))),
    "a number for an array": lambda m: setattr(m, "buffer", 2.0),
    "a bool for an array": lambda m: setattr(m, "buffer", False),
    "a bool for a variable": lambda m: setattr(m, "w", True),
    "numpy of another dtype": lambda m: setattr(m, "numpy", np.ones(3, np.int32)),
    "a field of a config": lambda m: setattr(m.config, "scale", 2.0),
    "a list in a config": lambda m: m.config.names.append("b"),
    "a namespace": lambda m: setattr(m.space, "k", 2),
    "a new name in a namespace": lambda m: setattr(m.space, "j", 2),
    "a queue": lambda m: m.queue.append(3),
    "a list in a named tuple": lambda m: m.pair.b.append(jnp.ones(2)),
    "a variable in a named tuple": lambda m: m.pair.a.set_metadata(tag="x"),
    "another named tuple": lambda m: setattr(m, "pair", Pair(1, m.pair.a)),
    "an array in a struct": lambda m: setattr(m, "box", m.box.replace(x=jnp.zeros(2))),
    "a static field of a struct": lambda m: setattr(m, "box", m.box.replace(name="b")),
    "an ordered dict": lambda m: m.ordered.move_to_end("b"),
    "an item of an ordered dict": lambda m: m.ordered.__setitem__("c", jnp.ones(1)),
    "a static list": lambda m: m.sizes.append(Layer),
    "a static list for data": lambda m: setattr(m, "sizes", nnx.data([1, jnp.ones(1)])),
    "a set": lambda m: (setattr(m, "sizes", nnx.static({"a"})), m.sizes.add("b")),
}
