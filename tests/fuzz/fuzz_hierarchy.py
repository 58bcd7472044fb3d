"""Random trees of `weft.hierarchy` modules under nested transformations, against Python loops.

A program is a block of calls of children and of transformations around further blocks. Its modules
interpret it; `Reference` does the same on dicts of arrays, with the keys, summaries, state updates
and module outputs of each iteration taken apart and put together by hand.
"""

import dataclasses
import hashlib
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.fuzz.programs.interpreter import interpreted
from tests.keys import quick_key
from weft.config import REQUIRED, Required, config_class
from weft.hierarchy import transforms
from weft.hierarchy.module import Module, functional

Tree = dict[str, Any]
OUTPUTS = ("summaries", "state_updates", "module_outputs")
CUSTOM = ("custom_vjp", "custom_jvp")
PLAIN = ("jit", "remat", "checkify", *CUSTOM)
MAPPED = ("scan", "vmap", "ensemble", "shard_map", "pmap")
LOOPS = ("fori", "while")
DERIVATIVES = ("value_and_grad", "vjp", "jvp")
BRANCHES = ("cond", "switch")
KINDS = ("child", *PLAIN, *MAPPED, *LOOPS, *DERIVATIVES, *BRANCHES, "eval_shape")


@dataclasses.dataclass(frozen=True)
class Call:
    """Calls a child of its own, which adds to those of its outputs that are named."""

    name: str
    adds: tuple[str, ...] = ()
    draws: bool = False


@dataclasses.dataclass(frozen=True)
class Level:
    """A transformation of a block; `child` and `ensemble` are modules of their own.

    Attributes:
        kind: which.
        name: unique in the module.
        body: statements.
        size: of a loop or a mapped axis.
        taken: which branch runs, None for one that depends on the index.
        differs: whether the second branch makes no state updates.
    """

    kind: str
    name: str
    body: tuple[Any, ...] = ()
    size: int = 2
    taken: int | None = 0
    differs: bool = False


Block = tuple[Call | Level, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """Constraints on a block.

    Attributes:
        depth: how many more levels fit.
        prefix: of the names of what is called below.
        quiet: whether a loop around refuses outputs.
        without: the kinds that cannot be here: what JAX cannot differentiate, or lay out twice.
    """

    depth: int
    prefix: str = ""
    quiet: bool = False
    without: frozenset[str] = frozenset()


NOT_INSIDE = {
    "jvp": {"while", "custom_vjp"},
    "custom_jvp": {"while", "custom_vjp"},
    "shard_map": {"shard_map", "pmap"},
    "pmap": {"shard_map", "pmap"},
    **{key: {"while"} for key in ("value_and_grad", "vjp", "custom_vjp")},
}


@st.composite
def blocks(draw, place: Place) -> Block:
    found: list[Call | Level] = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        name = place.prefix + name
        if not place.depth or draw(st.booleans()):
            adds = () if place.quiet else tuple(o for o in OUTPUTS if draw(st.booleans()))
            found.append(Call(name, adds, draw(st.booleans())))
            continue
        kind = draw(st.sampled_from([k for k in KINDS if k not in place.without]))
        inside = Place(
            place.depth - 1,
            "" if kind in ("child", "ensemble") else name,
            place.quiet or kind in LOOPS,
            place.without | NOT_INSIDE.get(kind, set()),
        )
        sizes = {"shard_map": [1], "pmap": [1], "vmap": [2, 1, 3], "ensemble": [2, 1, 3]}
        size = draw(st.sampled_from(sizes.get(kind, [2, 1, 3, 0])))
        body = draw(blocks(inside))
        taken, differs = 0, False
        if kind in BRANCHES:
            taken = draw(st.sampled_from([0, 1, None]))
            differs = not any(of.kind in MAPPED for of in _levels(body)) and draw(st.booleans())
        found.append(Level(kind, name, body, size, taken, differs))
    return tuple(found)


def _levels(of: Block):
    for s in of:
        if isinstance(s, Level):
            yield s
            yield from _levels(s.body)


CASES = st.tuples(
    st.sampled_from([1, 2, 3, 4, 5]).flatmap(lambda depth: blocks(Place(depth))),
    st.sampled_from(["traced"] * 8 + ["eager", "jit"]),
)
SHORT = 4


def without_updates(of: Block) -> Block:
    return tuple(
        dataclasses.replace(s, body=without_updates(s.body))
        if isinstance(s, Level)
        else dataclasses.replace(s, adds=tuple(a for a in s.adds if a != "state_updates"))
        for s in of
    )


def number(key: Any) -> Any:
    return jax.random.bits(key) / 2.0**32


def parts(of: Block) -> dict[str, Call | Level]:
    """Returns the children of a module, by name."""
    found: dict[str, Call | Level] = {}
    for s in of:
        if isinstance(s, Call) or s.kind in ("child", "ensemble"):
            found[s.name] = s
        else:
            found.update(parts(s.body))
    return found


class Leaf(Module):
    """Takes a `Call`."""

    def forward(self, of: Call, x):
        w = self.state["w"]
        y = jnp.sin(x * w + (number(self.prng_key) if of.draws else 0))
        if "summaries" in of.adds:
            self.add_summary("s", y)
        if "state_updates" in of.adds:
            self.add_state_update("w", w + y)
        if "module_outputs" in of.adds:
            self.add_module_output("o", 2 * y)
        return y


class Part(Module):
    """Runs a block. Its children are those of the block, and of the levels in it."""

    @config_class
    class Config(Module.Config):
        block: Required[Any] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        for name, of in parts(cfg.block).items():
            leaf = isinstance(of, Call)
            child = Leaf.default_config() if leaf else Part.default_config().set(block=of.body)
            self._add_child(name, child)

    def forward(self, of: Level, x, i):
        if of.kind == "child":
            return self.run(of.body, x, i)
        ks = jnp.arange(of.size)
        f = transforms.vmap(lambda x, k: self.run(of.body, x, k), state_axis=0)
        return jnp.sin(f(x + 0.1 * ks, ks).sum())

    def run(self, block: Block, x, i):
        TRACES.append(trace(block, self.path()))
        for s in block:
            if isinstance(s, Call):
                x = self.children[s.name](s, x)
            elif s.kind in ("child", "ensemble"):
                x = self.children[s.name](s, x, i)
            else:
                x = WEFT[s.kind](s, lambda x, i=i, s=s: self.run(s.body, x, i), x, i, self)
        return x


def by_checkify(of, f, x, i, module):
    return transforms.checkify(f)(x)[1]


# JAX does not differentiate a function with rules twice if it refers to an index of a loop around
# it, so the index is an argument.
def by_custom_vjp(of, f, x, i, module):
    def of_floats(x, i):
        return f(x, i.astype(int))

    def forward(x, i):
        return transforms.vjp(of_floats, x, i)

    lifted = transforms.custom_vjp(of_floats, forward, lambda pullback, ct: pullback(ct))
    return lifted(x, jnp.asarray(i, float))


def by_custom_jvp(of, f, x, i, module):
    def of_floats(x, i):
        return f(x, i.astype(int))

    def rule(primals, tangents, of_state):
        return transforms.jvp(of_floats, primals, tangents, of_state)

    return transforms.custom_jvp(of_floats, rule)(x, jnp.asarray(i, float))


def by_scan(of, f, x, i, module):
    def body(x, k):
        x = f(x + 0.1 * k, k)
        return x, x

    x, ys = transforms.scan_in_context(
        body, carry=x, xs=jnp.arange(of.size), child_name_prefix=f"{of.name}_"
    )
    return jnp.sin(x + ys.sum())


def by_vmap(of, f, x, i, module):
    ks = jnp.arange(of.size)
    return jnp.sin(transforms.vmap(f, state_axis=None)(x + 0.1 * ks, ks).sum())


def by_pmap(of, f, x, i, module):
    return jnp.sin(transforms.pmap(f, state_axis=None)(x[None], jnp.arange(1))[0])


def by_shard_map(of, f, x, i, module):
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
    lifted = transforms.shard_map(
        lambda x: f(x, 0), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jnp.sin(lifted(x))


def by_value_and_grad(of, f, x, i, module):
    y, g = transforms.value_and_grad(f)(x)
    return jnp.sin(y + g)


def by_vjp(of, f, x, i, module):
    y, pullback = transforms.vjp(f, x)
    return jnp.sin(y + sum(map(jnp.sum, jax.tree.leaves(pullback(jnp.ones_like(y))))))


def by_jvp(of, f, x, i, module):
    tangents = jax.tree.map(jnp.ones_like, module.state)
    return jnp.sin(sum(transforms.jvp(f, (x,), (jnp.ones_like(x),), tangents)))


def by_branch(of, f, x, i, module):
    def second(x):
        return module.run(without_updates(of.body) if of.differs else of.body, x + 1, i)

    taken = i % 2 if of.taken is None else of.taken
    if of.kind == "switch":
        return transforms.switch(taken, [f, second], x)
    return transforms.cond(taken == 0, f, second, x)


def by_eval_shape(of, f, x, i, module):
    assert transforms.eval_shape(f, x).shape == ()
    return x


WEFT: dict[str, Callable[..., Any]] = {
    "jit": lambda of, f, x, i, module: transforms.jit(f)(x),
    "remat": lambda of, f, x, i, module: transforms.remat(f)(x),
    "checkify": by_checkify,
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
    "scan": by_scan,
    "vmap": by_vmap,
    "pmap": by_pmap,
    "shard_map": by_shard_map,
    "fori": lambda of, f, x, i, module: transforms.fori_loop(0, of.size, lambda k, x: f(x, k), x),
    "while": lambda of, f, x, i, module: transforms.while_loop(
        lambda c: c[0] < of.size, lambda c: (c[0] + 1, f(c[1], c[0])), (0, x)
    )[1],
    "value_and_grad": by_value_and_grad,
    "vjp": by_vjp,
    "jvp": by_jvp,
    "cond": by_branch,
    "switch": by_branch,
    "eval_shape": by_eval_shape,
}


def states(of: Block, shape: tuple[int, ...] = ()) -> Tree:
    """Returns a state for the module of a block; ensembles have a leading axis."""
    found: Tree = {}
    for n, (name, s) in enumerate(parts(of).items()):
        if isinstance(s, Call):
            count = int(np.prod(shape))
            found[name] = {"w": jnp.linspace(0.5 + 0.1 * n, 1, count).reshape(shape)}
        else:
            found[name] = states(s.body, (*shape, s.size) if s.kind == "ensemble" else shape)
    return found


@dataclasses.dataclass
class Reference:
    """A module's invocation: its state and key, and what is added below it."""

    state: Tree
    key: Any
    outputs: Tree = dataclasses.field(default_factory=lambda: {kind: {} for kind in OUTPUTS})

    def child(self, name: str) -> "Reference":
        digest = int(hashlib.md5(name.encode()).hexdigest(), 16) % (2**31 - 1)
        return Reference(self.state[name], jax.random.fold_in(self.key, digest))

    def add(self, outputs: Tree) -> None:
        for kind in OUTPUTS:
            self.outputs[kind].update(outputs[kind])

    def run(self, block: Block, x: Any, i: int) -> Any:
        for s in block:
            if isinstance(s, Call) or s.kind in ("child", "ensemble"):
                child = self.child(s.name)
                if isinstance(s, Call):
                    x = child.leaf(s, x)
                elif s.kind == "child":
                    x = child.run(s.body, x, i)
                else:
                    x = child.mapped(
                        s, x, lambda tree, k: jax.tree.map(operator.itemgetter(k), tree)
                    )
                for kind in OUTPUTS:
                    self.outputs[kind][s.name] = child.outputs[kind]
            elif s.kind in (*PLAIN, "eval_shape"):
                x = x if s.kind == "eval_shape" else self.run(s.body, x, i)
            elif s.kind in DERIVATIVES:
                x = self.derivative(s, x, i)
            elif s.kind in BRANCHES:
                x = self.branch(s, x, i)
            elif s.kind in MAPPED:
                x = self.scan(s, x) if s.kind == "scan" else self.mapped(s, x, lambda tree, k: tree)
            else:
                x = self.loop(s, x)
        return x

    def leaf(self, of: Call, x: Any) -> Any:
        w = self.state["w"]
        y = jnp.sin(x * w + (number(self.key) if of.draws else 0))
        values = {
            "summaries": ("s", y),
            "state_updates": ("w", w + y),
            "module_outputs": ("o", 2 * y),
        }
        self.outputs = {kind: dict([values[kind]] if kind in of.adds else []) for kind in OUTPUTS}
        return y

    def keys(self, n: int) -> list[Any]:
        found, key = [], self.key
        for _ in range(n):
            key, of_one = jax.random.split(key)
            found.append(of_one)
        return found

    def mapped(self, of: Level, x: Any, taken: Callable[[Tree, int], Tree]) -> Any:
        ys, each = [], []
        for k, key in enumerate(self.keys(of.size)):
            one = Reference(taken(self.state, k), key)
            ys.append(one.run(of.body, x + 0.1 * k, k))
            each.append(one.outputs)
        self.add(jax.tree.map(lambda *values: jnp.stack(values), *each))
        return jnp.sin(sum(ys))

    def scan(self, of: Level, x: Any) -> Any:
        ys, each = [], []
        for k, key in enumerate(self.keys(of.size)):
            one = Reference(self.state, key)
            x = one.run(of.body, x + 0.1 * k, k)
            ys.append(x)
            each.append(one.outputs)
        for k, outputs in enumerate(each):
            self.outputs["summaries"][f"{of.name}_{k}"] = outputs.pop("summaries")
        if not each:
            none = Reference(self.state, self.key)
            none.run(of.body, x, 0)
            stacked = jax.tree.map(lambda v: jnp.zeros((0, *v.shape)), none.outputs)
        else:
            stacked = jax.tree.map(lambda *values: jnp.stack(values), *each)
        self.outputs["module_outputs"][f"{of.name}_"] = stacked["module_outputs"]
        self.add({**stacked, "summaries": {}, "module_outputs": {}})
        return jnp.sin(x + sum(ys))

    def loop(self, of: Level, x: Any) -> Any:
        keys = self.keys(of.size) if of.kind == "fori" else []
        for k in range(of.size):
            key = keys[k] if keys else jax.random.fold_in(self.key, k)
            x = Reference(self.state, key).run(of.body, x, k)
        return x

    def derivative(self, of: Level, x: Any, i: int) -> Any:
        def f(state: Tree, x: Any) -> Any:
            inside = Reference(state, self.key)
            return inside.run(of.body, x, i), inside.outputs

        (y, outputs), grads = jax.value_and_grad(f, (0, 1), has_aux=True)(self.state, x)
        self.add(outputs)
        # A tangent of ones gives the same as the sum of the gradients.
        summed = grads[1:] if of.kind == "value_and_grad" else grads
        return jnp.sin(y + sum(map(jnp.sum, jax.tree.leaves(summed))))

    def branch(self, of: Level, x: Any, i: int) -> Any:
        taken = i % 2 if of.taken is None else of.taken
        first, second = (Reference(self.state, self.key) for _ in range(2))
        ys = (
            first.run(of.body, x, i),
            second.run(without_updates(of.body) if of.differs else of.body, x + 1, i),
        )
        if of.differs:
            second.outputs["state_updates"] = before(first.outputs["state_updates"], self.state)
        self.add((first, second)[taken].outputs)
        return ys[taken]


def before(updates: Tree, state: Tree) -> Tree:
    """Returns the entries of a state at the places of updates."""
    return {k: before(v, state[k]) if isinstance(v, dict) else state[k] for k, v in updates.items()}


TRACES: list[str] = []


def check(case: tuple[Block, str]) -> None:
    try:
        check_once(case)
    except ValuesDifferError:
        # A program may amplify rounding errors a thousand times; the doubled precision tells.
        with jax.enable_x64(True):
            if is_stable(case[0]):
                check_once(case)


class ValuesDifferError(AssertionError):
    """Raised for values that differ by more than rounding errors usually do."""


def is_stable(block: Block) -> bool:
    """Returns whether a small change of the input makes a small change of the results."""
    runs = []
    for x in (0.25, 0.25 + 1e-9):
        right = Reference(states(block), quick_key(0))
        y = right.run(block, jnp.asarray(x), 0)
        runs.append([y, *jax.tree.leaves(right.outputs)])
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*runs, strict=True))


def check_once(case: tuple[Block, str]) -> None:
    block, how = case
    root = Part.default_config().set(name="root", block=block).instantiate(parent=None)
    state = states(block)
    TRACES.clear()

    def run(key: Any, state: Tree) -> Any:
        inputs = (Level("child", "", block), jnp.asarray(0.25), 0)
        return functional(root, key, state, inputs, is_training=True, drop_output_collections=())

    wrap = {"jit": jax.jit, "traced": interpreted, "eager": lambda f: f}[how]
    y, outputs = wrap(run)(quick_key(0), state)
    most = limits(block, root.path())
    for name, n in Counter(TRACES).items():
        assert n <= most[name], f"{name} was traced {n} times, right is at most {most[name]}"
    right = Reference(state, quick_key(0))
    expected = right.run(block, jnp.asarray(0.25), 0)
    close("the result", y, expected)
    found, right_outputs = leaves(outputs._asdict()), leaves(right.outputs)
    assert sorted(found) == sorted(right_outputs), f"{sorted(found)}, right {sorted(right_outputs)}"
    for path, value in right_outputs.items():
        close(path, found[path], value)


def limits(block: Block, path: str, most: int = 1) -> dict[str, int]:
    """Returns how often each block may be traced.

    That is once: nothing is made here. Both branches are one block, and a rule of one's own is a
    second trace of it.
    """
    found = {trace(block, path): most}
    for s in block:
        if isinstance(s, Level):
            inside = f"{path}.{s.name}" if s.kind in ("child", "ensemble") else path
            twice = s.kind in (*BRANCHES, *CUSTOM)
            found.update(limits(s.body, inside, most * 2 if twice else most))
    return found


def trace(block: Block, path: str) -> str:
    return f"{path}: {[s.name for s in block]}"


def leaves(tree: Tree) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def close(what: str, found: Any, right: Any) -> None:
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape, f"{what} has the shape {found.shape}, right is {right.shape}"
    if not np.allclose(found, right, rtol=1e-3, atol=1e-4):
        raise ValuesDifferError(f"{what} is {found}, right is {right}")


def source(case: tuple[Block, str]) -> str:
    return f"from tests.fuzz.fuzz_hierarchy import Call, Level, check\n\ncheck({case!r})\n"
