"""Programs as source for functions of scopes (`weft.core`) and for Linen modules."""

import textwrap
from collections import Counter

from tests.fuzz.programs.ir import (
    COLLECTIONS,
    CUSTOM,
    LOOPS,
    STREAMS,
    Block,
    Draw,
    Level,
    Program,
    Use,
)

COMMON = """
import types

import jax
import jax.numpy as jnp

from weft.core import meta
{imports}
NOTES = types.ModuleType("notes")
NOTES.traces = []


def number(key):
    return jax.random.bits(key) / 2.0**32


def made(scope, col, name, first):
    if not scope.has_variable(col, name):
        scope.put_variable(col, name, first())
    return meta.unbox(scope.get_variable(col, name))


def write(scope, col, name, value):
    before = scope.get_variable(col, name)
    scope.put_variable(col, name, meta.replace_boxed(before, value))
"""

IMPORTS = {
    "core": "from weft.core import apply, init, lift\n",
    "linen": "from weft import linen as nn\n",
}
ONE_DEVICE = """
ONE = jax.sharding.PartitionSpec()
MESH = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
"""
# JAX does not differentiate a function with rules twice if it refers to an index of a loop around
# it, so the index is an argument.
WITH_RULES = {
    "custom_jvp": """
def custom_jvp(f, s, x, i):
    def of_floats(s, x, i):
        return f(s, x, i.astype(int))

    def rule(s, primals, tangents, of_variables):
        return {lift}.jvp(of_floats, s, primals, tangents, of_variables)

    return {lift}.custom_jvp(of_floats, rule)(s, x, jnp.float32(i))
""",
    "custom_vjp": """
def custom_vjp(f, s, x, i):
    def of_floats(s, x, i):
        return f(s, x, i.astype(int))

    def forward(s, x, i):
        return {lift}.vjp(of_floats, s, x, i)

    lifted = {lift}.custom_vjp(of_floats, forward, lambda pullback, ct: pullback(ct))
    return lifted(s, x, jnp.float32(i))
""",
    "jvp": """
def tangent(f, s, x):
    tangents = {{}}
    if not s.is_mutable_collection("params"):
        tangents = {{"params": jax.tree.map(jnp.ones_like, {params})}}
    y, of_y = {lift}.jvp(f, s, (x,), (jnp.float32(1),), tangents)
    return jnp.sin(y + of_y)
""",
}


class Writer:
    """Writes a program, block by block."""

    def __init__(self, program: Program):
        self.program = program
        self.linen = program.way == "linen"
        self.lift = "nn" if self.linen else "lift"
        self.done: list[str] = []
        self.loops: dict[str, tuple[Level, ...]] = {}
        self.uses = Counter(_names(program.block, ()))

    def source(self) -> str:
        """Returns a module with `initialize(keys, x)` and `run(variables, keys, x)`."""
        main = self.block(self.program.block, ())
        ends = "".join(f" + number(s.make_rng({stream!r}))" for stream in STREAMS)
        self.done.append(f"def program(s, x):\n    return {main}(s, x, 0){ends}\n")
        mutable = sorted({*COLLECTIONS[1:], *self.program.dropped})
        if self.linen:
            self.done.append(
                "class Program(nn.Module):\n    @nn.compact\n"
                "    def __call__(self, x):\n        return program(self, x)\n"
            )
            init, apply = "Program().init_with_output(keys, x)", "Program().apply(variables, x, "
        else:
            init, apply = "init(program)(keys, x)", "apply(program, "
        run = (
            f"rngs=keys, mutable={mutable})"
            if self.linen
            else f"mutable={mutable})(variables, x, rngs=keys)"
        )
        wrap = {"jit": "@jax.jit\n", "traced": "@interpreted\n"}.get(self.program.how, "")
        self.done.append(f"{wrap}def initialize(keys, x):\n    return {init}\n")
        self.done.append(f"{wrap}def run(variables, keys, x):\n    return {apply}{run}\n")
        imports = IMPORTS[self.program.way]
        if self.program.how == "traced":
            imports = "from tests.fuzz.programs.interpreter import interpreted\n" + imports
        head = COMMON.format(imports=imports).strip() + "\n"
        params = (
            's.variables.get("params", {})' if self.linen else 's.variables().get("params", {})'
        )
        used = {of.kind for of in _levels(self.program.block)}
        if "shard_map" in used:
            head += ONE_DEVICE
        for kind in sorted(used & set(WITH_RULES)):
            head += "\n" + WITH_RULES[kind].format(lift=self.lift, params=params)
        return head + "\n\n" + "\n\n".join(self.done)

    def loops_around(self) -> dict[str, tuple[Level, ...]]:
        """Returns the loops and rules around each block, by its name, the outermost one first."""
        self.source()
        return self.loops

    def block(self, of: Block, path: tuple[str, ...], loops: tuple[Level, ...] = ()) -> str:
        """Writes a block as a function; its name."""
        lines = []
        for n, statement in enumerate(of.statements):
            if isinstance(statement, Use):
                lines += self.use(statement, path, n)
            elif isinstance(statement, Draw):
                lines.append(f"x = jnp.sin(x + number(s.make_rng({statement.stream!r})))")
            else:
                lines += self.level(statement, path, loops)
        name = f"block{sum(d.startswith('def block') for d in self.done)}"
        self.loops[name] = loops
        body = [f"NOTES.traces.append({name!r})", *lines, "return x"]
        self.define(name, "s, x, i", body)
        return name

    def define(self, name: str, arguments: str, body: list[str]) -> None:
        self.done.append(
            f"def {name}({arguments}):\n" + textwrap.indent("\n".join(body), "    ") + "\n"
        )

    def use(self, of: Use, path: tuple[str, ...], n: int) -> list[str]:
        first = {"const": "jnp.float32(0.5)", "x": "x", "key": "number({key})"}[of.first]
        if of.wide:
            first = (
                f"jnp.stack([{first}, {first} + 1])"
                if of.first != "key"
                else ("jnp.stack([({f} := " + first + "), {f} + 1])").replace("{f}", "f")
            )
        if of.boxed:
            names = (None,) * of.wide
            first = f"meta.Partitioned({first}, {names})"
        is_param = of.col == "params" and of.first == "key" and not of.write
        if is_param and self.uses[of.col, path, of.name] == 1:
            first = first.replace("{key}", "key")
            return [f"v = s.param({of.name!r}, lambda key: {first})", "x = jnp.sin(x + v.sum())"]
        first = first.replace("{key}", "s.make_rng('params')")
        at = f"{of.col!r}, {of.name!r}"
        change = {"count": "v + 1", "mix": "0.5 * v + x"}.get(of.write)
        if self.uses[of.col, path, of.name] == 1:
            lines = [f"ref = s.variable({at}, lambda: {first})"]
            if change:
                lines.append("ref.value = " + change.replace("v", "ref.value"))
            return [*lines, "x = jnp.sin(x + ref.value.sum())"]
        lines = [f"v = made(s, {at}, lambda: {first})"]
        if change:
            lines += [f"v = {change}", f"write(s, {at}, v)"]
        return [*lines, "x = jnp.sin(x + v.sum())"]

    def level(self, of: Level, path: tuple[str, ...], loops: tuple[Level, ...]) -> list[str]:
        inside = (*path, of.scope) if of.scope else path
        if of.kind in (*LOOPS, *CUSTOM):
            loops = (*loops, of)
        blocks = [self.block(b, inside, loops) for b in (of.body, *of.others)]
        return getattr(self, of.kind)(of, *blocks)

    def own(self, of: Level) -> str:
        return f's.push("{of.scope}", reuse=True)' if of.scope else "s"

    def called(self, of: Level, name: str, lifted: str, body: list[str], inputs: str, args: str):
        """Lines that call a lifted function of (s, *inputs), `{f}` in `lifted`."""
        if self.linen and of.scope:
            cls = f"Module{len(self.done)}"
            self.done.append(
                f"class {cls}(nn.Module):\n    @nn.compact\n    def __call__(s, {inputs}):\n"
                + textwrap.indent("\n".join(body), "        ")
                + "\n"
            )
            return f"{lifted.format(f=cls)}(name={of.scope!r})({args})"
        step = f"step{len(self.done)}"
        self.define(step, f"s, {inputs}", body)
        return f"{lifted.format(f=step)}({self.own(of)}, {args})"

    def child(self, of: Level, f: str) -> list[str]:
        call = self.called(of, f, "{f}", [f"return {f}(s, x, i)"], "x, i", "x, i")
        return [f"x = {call}"]

    def remat(self, of: Level, f: str) -> list[str]:
        call = self.called(
            of, f, self.lift + ".remat({f})", [f"return {f}(s, x, i)"], "x, i", "x, i"
        )
        return [f"x = {call}"]

    def jit(self, of: Level, f: str) -> list[str]:
        call = self.called(of, f, self.lift + ".jit({f})", [f"return {f}(s, x, i)"], "x, i", "x, i")
        return [f"x = {call}"]

    def scan(self, of: Level, f: str) -> list[str]:
        options = (
            f"variable_axes={self.axes(of)}, variable_broadcast={self.having(of, None)}, "
            f"variable_carry={self.having(of, 'carry')}, split_rngs={self.split(of)}, "
            f"length={of.size}, reverse={of.reverse}, {self.metadata(of)}"
        )
        body = [f"x = {f}(s, x + 0.1 * i, i)", "return x, x"]
        lifted = f"{self.lift}.scan({{f}}, {options})".replace("{'", "{{'").replace("'}", "'}}")
        lifted = self.braces(f"{self.lift}.scan(@, {options})")
        call = self.called(of, f, lifted, body, "x, i", f"x, jnp.arange({of.size})")
        return [f"x, ys = {call}", "x = jnp.sin(x + ys.sum())"]

    def vmap(self, of: Level, f: str) -> list[str]:
        options = f"{self.axes(of)}, {self.split(of)}, {self.metadata(of)}"
        lifted = self.braces(f"{self.lift}.vmap(@, {options})")
        ks = f"jnp.arange({of.size})"
        call = self.called(of, f, lifted, [f"return {f}(s, x, i)"], "x, i", f"x + 0.1 * {ks}, {ks}")
        return [f"x = jnp.sin({call}.sum())"]

    def fori(self, of: Level, f: str) -> list[str]:
        return [
            f"x = {self.lift}.fori_loop(0, {of.size}, lambda i, s, x: {f}(s, x, i), s, x, "
            f"{self.loop(of)})"
        ]

    def loop(self, of: Level) -> str:
        return (
            f"carry_variables={self.having(of, 'carry')}, "
            f"broadcast_variables={self.having(of, None)}, split_rngs={self.split(of)}"
        )

    def cond(self, of: Level, f: str, g: str) -> list[str]:
        test = "i % 2 == 0" if of.taken is None else str(of.taken == 0)
        return [f"x = {self.lift}.cond({test}, {f}, {g}, s, x, i)"]

    def switch(self, of: Level, *fs: str) -> list[str]:
        test = f"i % {len(fs)}" if of.taken is None else str(of.taken)
        return [f"x = {self.lift}.switch({test}, [{', '.join(fs)}], s, x, i)"]

    def value_and_grad(self, of: Level, f: str) -> list[str]:
        return [
            f"x, (g,) = {self.lift}.value_and_grad(lambda s, x: {f}(s, x, i), s, x)",
            "x = jnp.sin(x + g)",
        ]

    def vjp(self, of: Level, f: str) -> list[str]:
        return [
            f"x, pullback = {self.lift}.vjp(lambda s, x: {f}(s, x, i), s, x)",
            "*of_params, of_x = pullback(jnp.float32(1))",
            "if s.is_mutable_collection('params'):",
            "    of_params = []",
            "x = jnp.sin(x + of_x + sum(map(jnp.sum, jax.tree.leaves(of_params))))",
        ]

    def jvp(self, of: Level, f: str) -> list[str]:
        return [f"x = tangent(lambda s, x: {f}(s, x, i), s, x)"]

    def custom_jvp(self, of: Level, f: str) -> list[str]:
        return [f"x = custom_jvp({f}, s, x, i)"]

    def custom_vjp(self, of: Level, f: str) -> list[str]:
        return [f"x = custom_vjp({f}, s, x, i)"]

    def checkify(self, of: Level, f: str) -> list[str]:
        return [f"_, x = {self.lift}.checkify({f})(s, x, i)"]

    def shard_map(self, of: Level, f: str) -> list[str]:
        specs = ", ".join(f"{c!r}: ONE" for c in COLLECTIONS)
        return [
            f"x = {self.lift}.shard_map({f}, {{{specs}}}, {self.split(of)}, mesh=MESH, "
            "in_specs=ONE, out_specs=ONE, check_vma=False)(s, x, i)"
        ]

    def braces(self, lifted: str) -> str:
        return lifted.replace("{", "{{").replace("}", "}}").replace("@", "{f}")

    def axes(self, of: Level) -> dict[str, int | None]:
        scanned = of.kind == "scan"
        return {c: r for c, r in of.roles if isinstance(r, int) or (not scanned and r is None)}

    def having(self, of: Level, role: str | None) -> list[str]:
        return [c for c, r in of.roles if r == role]

    def split(self, of: Level) -> dict[str, bool]:
        return {stream: stream in of.split for stream in STREAMS}

    def metadata(self, of: Level) -> str:
        return f"metadata_params={{meta.PARTITION_NAME: {of.scope!r}}}"


def _while(self: Writer, of: Level, f: str) -> list[str]:
    return [
        f"_, x = {self.lift}.while_loop(lambda s, c: c[0] < {of.size}, "
        f"lambda s, c: (c[0] + 1, {f}(s, c[1], c[0])), s, (0, x), {self.loop(of)})"
    ]


setattr(Writer, "while", _while)


def _names(of: Block, path: tuple[str, ...]):
    for statement in of.statements:
        if isinstance(statement, Use):
            yield statement.col, path, statement.name
        elif isinstance(statement, Level):
            inside = (*path, statement.scope) if statement.scope else path
            for b in (statement.body, *statement.others):
                yield from _names(b, inside)


def _levels(of: Block):
    for statement in of.statements:
        if isinstance(statement, Level):
            yield statement
            for b in (statement.body, *statement.others):
                yield from _levels(b)
