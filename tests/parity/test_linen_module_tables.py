"""Tables and lists of modules: the same models on Flax and on Weft."""

import jax.numpy as jnp
import pytest

from tests.parity.linen import same
from tests.parity.test_linen_module import RNGS, X, affine, counter, normal

PLAIN = {"width": 200, "force_terminal": False}


def model(nn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return counter(nn)()(affine(nn)(3)(x))

    class Model(nn.Module):
        def setup(self):
            self.blocks = [Block(), Block()]
            self.head = affine(nn)(4, False)
            self.own = self.param("own", nn.with_partitioning(normal, ("rows", "features")), (1, 2))
            self.small = self.variable("stats", "small", jnp.zeros, (5,), jnp.bfloat16)

        def body(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.own

        def __call__(self, x, *, scale=1.0, flag=True):
            x = self.body(x)
            return {"y": self.head(x) * scale, "z": [self.head(x), (x, None)]}

    return Model()


def cells(table):
    """Returns the lines of a table by their columns, whose order is by chance in Flax."""
    header, *lines = (line for line in table.split("\n") if line[:1] in "┃│├└" and line)
    names = [name.strip() for name in header.strip("┃").split("┃")]
    rows = [{name: [] for name in names}]
    for line in lines:
        if line[0] in "├└":
            rows.append({name: [] for name in names})
            continue
        for name, cell in zip(names, line.strip("│").split("│"), strict=True):
            rows[-1][name].append(cell.rstrip())
    stripped = [{k: "\n".join(v).strip() for k, v in row.items()} for row in rows]
    return stripped, table.split()[:2], table.split()[-5:]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 0},
        {"depth": 1},
        {"show_repeated": True},
        {"compute_flops": True, "compute_vjp_flops": True, "depth": 2},
        {"mutable": ["params"], "method": "body"},
        {"scale": 2.0, "flag": False},
        {"table_kwargs": {"title_style": "bold"}, "column_kwargs": {"justify": "right"}},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_tables(options):
    if "mutable" in options:
        options = {**options, "mutable": ["params", "state", "stats"]}
    same(lambda nn: (cells(model(nn).tabulate(RNGS, X, console_kwargs=PLAIN, **options)), {}))


def test_tables_as_functions():
    def program(nn):
        return cells(nn.tabulate(model(nn), RNGS, console_kwargs=PLAIN)(X, scale=3)), {}

    same(program)


@pytest.mark.parametrize("show_repeated", [False, True])
def test_paths(show_repeated):
    def program(nn):
        paths = model(nn).module_paths(RNGS, X, show_repeated=show_repeated)
        return [(path, repr(module)) for path, module in paths.items()], {}

    same(program)


def transformed(nn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return affine(nn)(x.shape[-1])(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            keys = {"split_rngs": {"params": True}}
            x, _ = nn.scan(nn.remat(Block), {"params": 0}, length=2, **keys)()(x, None)
            return nn.vmap(affine(nn), {"params": 0}, **keys)(2)(x)

    return nn.jit(Model)()


def test_transformed_modules_are_shown_as_what_they_transform():
    def program(nn):
        paths = transformed(nn).module_paths(RNGS, X)
        shown = [(path, repr(module), type(module).__name__) for path, module in paths.items()]
        return (shown, cells(transformed(nn).tabulate(RNGS, X, console_kwargs=PLAIN))), {}

    same(program)


def test_texts_of_modules():
    def program(nn):
        class Given(nn.Module):
            inner: nn.Module
            table: dict

        class Outer(nn.Module):
            act: object = jnp.tanh

            def setup(self):
                self.made = [affine(nn)(), counter(nn)()]

            @nn.compact
            def __call__(self, x):
                return self.made[0](affine(nn)(name="last")(x)), repr(self)

        y, variables = Outer(name="named").init_with_output(RNGS, X)
        return (repr(Given(affine(nn)(3), {"a": 1})), y, repr(Outer().bind(variables))), variables

    same(program)
