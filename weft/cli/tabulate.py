"""`weft tabulate`: a model as a table, from the specs of its parameters."""

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from weft.cli.configs import load_config
from weft.cli.display import bytes_text
from weft.cli.flops import count_flops
from weft.hierarchy.module import Module, functional
from weft.hierarchy.parameter_spec import ParameterSpec


class Row(NamedTuple):
    """A module with the parameters of its own.

    Attributes:
        path: From the model, dotted.
        kind: The name of its class.
        specs: Its own parameters by name.
        total: The number of values in its parameters and those below.
    """

    path: str
    kind: str
    specs: Mapping[str, ParameterSpec]
    total: int


def run(arguments: argparse.Namespace) -> int:
    """Prints the table of a recipe's model."""
    cfg = load_config(arguments.recipe, arguments.overrides)
    model = cfg.model.set(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    total, size = _size(specs)
    columns = ("module", "class", "parameters", "shape", "dtype", "layout")
    footers = ("total", "", f"{total:,}", "", bytes_text(size), "")
    for title, footer in zip(columns, footers, strict=True):
        justify = "right" if title == "parameters" else "left"
        table.add_column(title, footer, justify=justify, overflow="fold")
    for row in module_rows(model, specs):
        depth = row.path.count(".")
        name = "  " * depth + row.path.rpartition(".")[2]
        table.add_row(name, row.kind, f"{row.total:,}" if row.total else "", "", "", "")
        for parameter, spec in row.specs.items():
            table.add_row(
                "  " * (depth + 1) + parameter,
                "",
                f"{math.prod(spec.shape):,}",
                str(tuple(spec.shape)),
                jnp.dtype(spec.dtype or jnp.float32).name,
                _layout(spec),
            )
    console = Console(highlight=False)
    console.print(table)
    console.print(_flops_line(cfg, model, specs), soft_wrap=True)
    return 0


def module_rows(module: Module, specs: Any) -> Iterator[Row]:
    """A row for each module that has parameters, in itself or below.

    Args:
        module: A layer.
        specs: Of its parameters, nested as its modules are.
    """
    own = {name: spec for name, spec in specs.items() if isinstance(spec, ParameterSpec)}
    yield Row(module.path(), type(module).__name__, own, _size(specs)[0])
    for name, child in specs.items():
        if name in module.children and _size(child)[0]:
            yield from module_rows(module.children[name], child)


def _size(specs: Any) -> tuple[int, int]:
    """The number of values and of bytes."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParameterSpec))
    sizes = [(math.prod(s.shape), jnp.dtype(s.dtype or jnp.float32).itemsize) for s in leaves]
    return sum(n for n, _ in sizes), sum(n * b for n, b in sizes)


def _layout(spec: ParameterSpec) -> str:
    return str(tuple(spec.partition_spec)) if any(spec.partition_spec) else ""


def _flops_line(cfg: Any, model: Module, specs: Any) -> str:
    """What a forward pass costs, counted in the traced program of one batch."""
    source = cfg.input.set(name="input").instantiate(parent=None)
    batch = source.element_spec()
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or jnp.float32),
        specs,
        is_leaf=lambda x: isinstance(x, ParameterSpec),
    )

    def forward(params: Any, batch: Any) -> Any:
        inputs = {"input_batch": batch}
        return functional(model, prng_key=None, state=params, inputs=inputs, is_training=False)

    flops = count_flops(forward, params, batch)
    rows = jax.tree.leaves(batch)[0].shape[0]
    return f"{flops / rows:.3g} FLOPs for an example, forward; {3 * flops:.3g} for a training step"
