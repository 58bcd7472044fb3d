"""Models that are changed at random, and called in between."""

import copy

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.nnx.transforms.changes import Layer
from tests.nnx.transforms.looks import is_like_plain, work
from weft import nnx

VALUES = st.sampled_from(
    [1, 1.0, True, None, "a", (1, 2), jnp.ones(2), jnp.float32(3), np.ones(2, np.float32)]
)
NAMES = st.sampled_from(["x", "y", "layer", "items", "table"])


class Machine(RuleBasedStateMachine):
    """Changes a model at random and compares each call with plain Python."""

    def __init__(self):
        super().__init__()
        self.f = nnx.jit(work)
        self.model, self.other = Layer(1.0), Layer(2.0)
        self.model.items, self.model.table = [1], {"a": Layer(3.0)}

    def parts(self):
        return [x for _, x in nnx.iter_graph(self.model) if isinstance(x, nnx.Pytree)]

    def variables(self):
        return [x for _, x in nnx.iter_graph(self.model) if isinstance(x, nnx.Variable)]

    def lists(self):
        return [x for x in self.parts() if isinstance(x, nnx.List)]

    @rule(data=st.data(), name=NAMES, value=VALUES)
    def set_value(self, data, name, value):
        setattr(data.draw(st.sampled_from(self.parts())), name, value)

    @rule(data=st.data(), name=NAMES, value=VALUES)
    def set_variable(self, data, name, value):
        kind = data.draw(st.sampled_from([nnx.Param, nnx.Cache]))
        setattr(
            data.draw(st.sampled_from(self.parts())),
            name,
            kind(1 if isinstance(value, str) else value),
        )

    @rule(data=st.data(), name=NAMES)
    def share(self, data, name):
        x = data.draw(st.sampled_from(self.parts() + self.variables()))
        setattr(data.draw(st.sampled_from(self.parts())), name, x)

    @rule(data=st.data(), name=NAMES, make=st.sampled_from([Layer, list, dict, tuple]))
    def set_container(self, data, name, make):
        setattr(data.draw(st.sampled_from(self.parts())), name, make())

    @rule(data=st.data())
    def delete(self, data):
        part = data.draw(st.sampled_from(self.parts()))
        names = [name for name, _ in part._items() if isinstance(name, str)]
        if names:
            delattr(part, data.draw(st.sampled_from(names)))

    @precondition(lambda self: self.lists())
    @rule(data=st.data(), value=VALUES, i=st.integers(-2, 2))
    def change_list(self, data, value, i):
        xs = data.draw(st.sampled_from(self.lists()))
        method = data.draw(st.sampled_from(["append", "insert", "pop", "reverse", "item", "new"]))
        if method == "insert":
            xs.insert(i, value)
        elif method == "append":
            xs.append(value)
        elif method == "new":
            xs.append(Layer())
        elif method == "reverse":
            xs.reverse()
        elif -len(xs) <= i < len(xs):
            xs.pop(i) if method == "pop" else xs.__setitem__(i, value)

    @precondition(lambda self: self.variables())
    @rule(data=st.data(), value=VALUES)
    def change_variable(self, data, value):
        variable = data.draw(st.sampled_from(self.variables()))
        method = data.draw(st.sampled_from(["value", "set", "del"]))
        if method == "value":
            variable.set_value(None if isinstance(value, str) else value)
        elif method == "set":
            variable.set_metadata(k=value)
        elif variable.has_metadata("k"):
            variable.del_metadata("k")

    @rule(copied=st.sampled_from([copy.deepcopy, nnx.clone, lambda m: m]))
    def replace(self, copied):
        self.model, self.other = copied(self.model), self.model

    @rule()
    def eval(self):
        self.model.eval()

    @rule(data=st.data())
    def call(self, data):
        m, n = self.model, self.other
        call = data.draw(st.sampled_from([(m,), (m, n), (n, m), (m, 1.0), ([m],), (m, m)]))
        is_like_plain(self.f, *call)
        if data.draw(st.booleans()):
            is_like_plain(self.f, *call)

    @rule()
    def call_by_name(self):
        is_like_plain(self.f, x=self.model)


Machine.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestMachine = Machine.TestCase
