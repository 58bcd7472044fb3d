"""Objects that are changed at random between the calls of cached functions, against plain Python.

A case is a list of steps. A step changes a model, or calls one of the compiled functions with it;
the same function then runs without a transformation on a copy, and all that is to be seen is
compared. What the steps name by number is counted around, so that any list of steps is a case.
"""

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.nnx.transforms.object_changes import ARRAYS, CHANGES, Box, Config, Layer
from tests.nnx.transforms.object_snapshots import is_like_plain, look, same, work
from weft import nnx
from weft.errors import AttributeMarkError, TraceContextError


@dataclasses.dataclass
class Equal:
    """Compared by what it holds, and has no hash."""

    k: int


@dataclasses.dataclass
class Called:
    """As `Equal`, and a function."""

    k: int

    def __call__(self, x: float) -> float:
        return self.k * x


NAMES = ("x", "y", "a", "b", "layers", "heads", "scale")
VALUES: tuple[Callable[[], Any], ...] = (
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: -0.0,
    lambda: None,
    lambda: "a",
    lambda: (1, 2),
    lambda: jnp.ones(2),
    lambda: jnp.float32(3),
    lambda: jnp.arange(3),
    lambda: np.ones(2, np.float32),
    lambda: nnx.static({"a"}),
    lambda: nnx.static(Config(1.0)),
    lambda: Config(2.0, ["c"]),
    lambda: Box(jnp.ones(2)),
    lambda: types.SimpleNamespace(k=1),
    lambda: collections.deque([1, 2]),
    lambda: functools.partial(pow, 2.0),
    lambda: nnx.data(jnp.array(3)),
    lambda: [Layer(2.0)],
    lambda: {"k": Layer(3.0)},
    lambda: (Layer(4.0), 1),
    lambda: bytearray(b"ab"),
    lambda: Equal(1),
    lambda: Called(2),
    lambda: nnx.static([1, "a"]),
    lambda: nnx.static({"a": [1]}),
    lambda: (1, [2]),
)
KINDS = (nnx.Param, nnx.BatchStat, nnx.Cache)
COPIES = (copy.deepcopy, nnx.clone, lambda m: nnx.merge(*nnx.split(m)))
EDITS = tuple({**CHANGES, **ARRAYS}.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a case.

    Attributes:
        kind: the name of a function of this module, without `do_`.
        at: the number of the object that it happens to.
        name: of an attribute, by number.
        value: the number of a value, or of another object.
    """

    kind: str
    at: int = 0
    name: int = 0
    value: int = 0


class Model(nnx.Module):
    """With attributes of those whose changes are known, and few of them: it is compiled often."""

    gain = 1.0  # of the class, which is read in the trace

    def __init__(self, large: bool):
        self.a, self.w = Layer(1.0), nnx.Param(jnp.arange(2.0), tag="a")
        self.layers, self.heads = [Layer(3.0)], {"b": nnx.Cache(jnp.float32(5.0))}
        self.scale, self.name = 1.0, "model"
        if large:
            self.b = self.a
            self.buffer, self.numpy = jnp.ones(2), np.ones(3, np.float32)
            self.config = Config(1.0, ["a"])


class World:
    """Two models and the functions that have met them."""

    def __init__(self) -> None:
        self.model, self.other = Model(True), Model(False)
        self.jitted = nnx.jit(work)
        self.read = nnx.jit(look)
        self.nested = nnx.jit(nnx.jit(nnx.remat(work)))
        self.gradients = nnx.jit(gradients)
        self.gains: list[float] = []
        self.gain = nnx.jit(functools.partial(gain, self.gains))
        Model.gain = 1.0

    def parts(self) -> list[Any]:
        return [x for _, x in nnx.iter_graph((self.model, self.other)) if isinstance(x, nnx.Pytree)]

    def variables(self) -> list[Any]:
        found = nnx.iter_graph((self.model, self.other))
        return [x for _, x in found if isinstance(x, nnx.Variable)]


def work_of_pair(pair: Any, _: Any) -> Any:
    return work(*pair)


def carry_pair(pair: Any, _: Any) -> Any:
    return pair, work(*pair)


CARRY = nnx.Carry, 0
MAPPED = tuple(
    around(nnx.vmap(inside(work_of_pair), in_axes=(None, 0)))
    for around, inside in ((lambda f: f, nnx.jit), (nnx.jit, lambda f: f), (nnx.jit, nnx.jit))
)
SCANNED = tuple(
    around(nnx.scan(inside(carry_pair), in_axes=CARRY, out_axes=CARRY))
    for around, inside in ((lambda f: f, nnx.jit), (nnx.jit, lambda f: f), (nnx.jit, nnx.jit))
)


def gain(gains: list[float], model: Any) -> Any:
    gains.append(type(model).gain)
    return look(model), jnp.float32(type(model).gain)


def gradients(model: Any, *rest: Any) -> Any:
    def loss(model: Any) -> Any:
        found = [x.get_value() for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
        floats = [
            x for x in jax.tree.leaves(found) if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        ]
        return sum((jnp.sum(jnp.sin(x)) for x in floats), jnp.float32(0))

    return jax.tree.leaves(nnx.grad(loss, argnums=nnx.DiffState(0, is_float))(model))


def is_float(path: Any, x: Any) -> bool:
    # Also a number and an array of NumPy, which a trace turns into an array of JAX.
    leaves = jax.tree.leaves(x.get_value() if isinstance(x, nnx.Variable) else x)
    floats = [jnp.issubdtype(jnp.result_type(v), jnp.floating) for v in leaves]
    return isinstance(x, nnx.Param) and bool(leaves) and all(floats)


def pick(of: Any, number: int) -> Any:
    return of[number % len(of)]


def do_set(w: World, s: Step) -> None:
    setattr(pick(w.parts(), s.at), pick(NAMES, s.name), pick(VALUES, s.value)())


def do_variable(w: World, s: Step) -> None:
    made = pick(KINDS, s.value)(pick((jnp.float32(2), jnp.ones(2), jnp.arange(2)), s.value // 3))
    setattr(pick(w.parts(), s.at), pick(NAMES, s.name), made)


def do_share(w: World, s: Step) -> None:
    shared = pick([*w.parts(), *w.variables()], s.value)
    setattr(pick(w.parts(), s.at), pick(NAMES, s.name), shared)


def do_swap(w: World, s: Step) -> None:
    """Swaps two attributes of one object, or of two."""
    a, b = pick(w.parts(), s.at), pick(w.parts(), s.value)
    names = [[n for n, _ in x._items() if isinstance(n, str)] for x in (a, b)]
    if all(names):
        n, m = pick(names[0], s.name), pick(names[1], s.name)
        x, y = getattr(a, n), getattr(b, m)
        setattr(a, n, y)
        setattr(b, m, x)


def do_delete(w: World, s: Step) -> None:
    part = pick(w.parts(), s.at)
    names = [n for n, _ in part._items() if isinstance(n, str)]
    if names:
        delattr(part, pick(names, s.name))


def do_write(w: World, s: Step) -> None:
    if w.variables():
        value = pick(
            (jnp.ones(2), jnp.float32(2), jnp.arange(3), {"b": jnp.ones(1)}, None), s.value
        )
        variable = pick(w.variables(), s.at)
        if variable.get_metadata().get("mutable") is not False:  # else it refuses
            variable.set_value(value)


def do_metadata(w: World, s: Step) -> None:
    if w.variables():
        variable = pick(w.variables(), s.at)
        if s.name % 3 == 2 and variable.has_metadata("k"):
            variable.del_metadata("k")
        else:
            variable.set_metadata(k=pick((1, 1.0, True, "a", (1, 2), None), s.value))


def do_list(w: World, s: Step) -> None:
    lists = [x for x in w.parts() if isinstance(x, nnx.List)]
    if lists:
        xs = pick(lists, s.at)
        if s.name % 5 == 0:
            xs.append(pick(VALUES, s.value)())
        elif s.name % 5 == 1:
            xs.insert(0, Layer(s.value))
        elif s.name % 5 == 2:
            xs.reverse()
        elif xs:
            xs.pop() if s.name % 5 == 3 else xs.__setitem__(0, pick(w.parts(), s.value))


def do_inside(w: World, s: Step) -> None:
    """Changes a value in place, without notice."""
    part = pick(w.parts(), s.at)
    for _, value in part._items():
        if isinstance(value, Config):
            value.scale = float(s.value)
        elif isinstance(value, types.SimpleNamespace | Equal | Called):
            value.k = s.value
        elif isinstance(value, collections.deque | bytearray):
            value.append(s.value)
        elif isinstance(value, np.ndarray) and value.ndim:
            value[...] = s.value


def do_edit(w: World, s: Step) -> None:
    pick(EDITS, s.value)(pick((w.model, w.other), s.at))


def do_mode(w: World, s: Step) -> None:
    model = pick((w.model, w.other), s.at)
    model.eval() if s.value % 2 else model.train()


def do_copy(w: World, s: Step) -> None:
    w.model, w.other = pick(COPIES, s.value)(w.model), w.model


def do_turn(w: World, s: Step) -> None:
    w.model, w.other = w.other, w.model


def do_call(w: World, s: Step) -> None:
    m, n = w.model, w.other
    args = pick(
        ((m,), (m, n), (n, m), (m, 1.0), ([m],), (m, m), (pick(w.parts(), s.at), m)), s.value
    )
    f = pick((w.jitted, w.nested), s.name)
    is_like_plain(f, *args)
    if s.name % 3 == 0:
        is_like_plain(f, *args)


def do_read(w: World, s: Step) -> None:
    args = pick(((w.model,), (w.other, w.model)), s.value)
    same(w.read(*args), look(*args))


def do_partial(w: World, s: Step) -> None:
    """Creates a cached partial of the current objects."""
    f = nnx.cached_partial(w.jitted, w.model)
    for _ in range(1 + s.value % 2):
        plain = copy.deepcopy(w.model)
        same(f(jnp.float32(s.at)), work(plain, jnp.float32(s.at)))
        same(look(w.model), look(plain))


def stacked(looks: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack([np.asarray(x, np.float64) for x in xs]), *looks)


def do_map(w: World, s: Step) -> None:
    """Writes shared state once, which every index sees."""
    pair, length = [w.model, w.other], 1 + s.name % 2
    plain = copy.deepcopy(pair)
    expected = stacked([work(*plain)] * length)
    same(pick(MAPPED, s.value)(pair, jnp.arange(length)), expected)
    same(look(*pair), look(*plain))


def do_scan(w: World, s: Step) -> None:
    pair, length = [w.model, w.other], 1 + s.name % 2
    plain = copy.deepcopy(pair)
    expected = stacked([work(*plain) for _ in range(length)])
    _, found = pick(SCANNED, s.value)(pair, jnp.arange(length))
    same(found, expected)
    same(look(*pair), look(*plain))


def do_gain(w: World, s: Step) -> None:
    """Reads the attribute of a class as it was when the function was traced."""
    if not isinstance(w.model, Model):
        return
    before = list(w.gains)
    looked, found = w.gain(w.model)
    same(looked, look(w.model))
    if len(w.gains) > len(before):
        assert w.gains[-1] == found == type(w.model).gain
    assert found in w.gains
    count = len(w.gains)
    assert w.gain(w.model)[1] == found
    assert len(w.gains) == count


def do_gradients(w: World, s: Step) -> None:
    found, right = w.gradients(w.model, w.other), gradients(copy.deepcopy(w.model))
    assert len(found) == len(right)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def do_class(w: World, s: Step) -> None:
    Model.gain = float(s.value)


CALLS = {
    "call": do_call,
    "read": do_read,
    "partial": do_partial,
    "gradients": do_gradients,
    "map": do_map,
    "scan": do_scan,
    "gain": do_gain,
}
CHANGING = {
    "edit": do_edit,
    "set": do_set,
    "variable": do_variable,
    "share": do_share,
    "swap": do_swap,
    "write": do_write,
    "metadata": do_metadata,
    "list": do_list,
    "delete": do_delete,
    "inside": do_inside,
    "mode": do_mode,
    "copy": do_copy,
    "turn": do_turn,
    "class": do_class,
}

numbers = st.integers(0, 30)
steps = st.builds(Step, st.sampled_from([*CALLS, *CHANGING]), numbers, numbers, st.integers(0, 120))
CASES = st.lists(steps, min_size=2, max_size=16)
SHORT = 5


def check(case: list[Step]) -> None:
    world = World()
    for step in case:
        if step.kind in CALLS:
            try:
                CALLS[step.kind](world, step)
            except (TraceContextError, AttributeMarkError):
                return  # An object is in a static value, where nothing can change or copy it.
            continue
        try:
            CHANGING[step.kind](world, step)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            # The part is gone, or nothing of that kind can be there.
            continue


def source(case: list[Step]) -> str:
    return f"from tests.fuzz.fuzz_objects import Step, check\n\ncheck({case!r})\n"
