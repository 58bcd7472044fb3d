"""`weft tabulate`: a model as a table, from its parameter specs and a trace of its loss."""

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.cli import configs
from weft.hierarchy import Module, ParameterSpec, functional
from weft.report import display
from weft.trainer import SpmdTrainer, mesh, state
from weft.trainer.model import build_model
from weft.trainer.profiling import Flops, count_flops
from weft.typing import Nested, NestedTensor


class Row(NamedTuple):
    """Row of a module or of one of its parameters.

    Attributes:
        path: Path within the model, joined by `/`; empty for the model.
        kind: Name of the module's class; empty for a parameter.
        specs: Spec of the parameter, or specs of all parameters below the module.
    """

    path: str
    kind: str
    specs: list[ParameterSpec]


def run(arguments: argparse.Namespace) -> int:
    """Prints the table of a recipe's model."""
    cfg = configs.load_config(arguments.recipe, arguments.overrides, **arguments.trust)
    model = build_model(cfg)
    specs = state.parameter_specs(model, mesh.rules_of(cfg).parameters)
    flops = forward_flops(cfg, model, specs)
    columns = ["class", "parameters", "FLOPs", "shape", "dtype", "layout"]
    table = display.tree_table("module", columns, numbers=["parameters", "FLOPs"])
    for row in rows("", model, specs):
        depth = row.path.count("/") + bool(row.path)
        name = "  " * depth + (row.path.rpartition("/")[2] or model.name)
        here = sum(n for path, n in flops.items() if _within(path, row.path))
        table.add_row(
            name, row.kind, f"{_values(row.specs):,}", display.count_text(here), *_cells(row)
        )
    console = display.table_console()
    console.print(table)
    for line in _totals(specs, flops):
        console.print(line, soft_wrap=True)
    return 0


def rows(path: str, module: Module | None, specs: Mapping[str, Any]) -> Iterator[Row]:
    """Yields a row for each module that has parameters, and for each of these.

    Args:
        module: The module; None for one that a layer hides.
    """
    yield Row(path, type(module).__name__ if module else "", jax.tree.leaves(specs))
    for name, child in specs.items():
        below = f"{path}/{name}".lstrip("/")
        if isinstance(child, ParameterSpec):
            yield Row(below, "", [child])
        elif jax.tree.leaves(child):
            yield from rows(below, module.children.get(name) if module else None, child)


def forward_flops(cfg: SpmdTrainer.Config, model: Module, specs: Nested[ParameterSpec]) -> Flops:
    """Counts the operations of the loss of one example, by parameter path.

    Args:
        cfg: The trainer's config, whose input provides the batch's shapes.
    """
    batch = cfg.input.set(name="input").instantiate(parent=None).element_spec()
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, _dtype(spec)), specs)

    def forward(params: NestedTensor, batch: NestedTensor) -> Any:
        inputs = {"input_batch": batch}
        return functional(model, prng_key=None, state=params, inputs=inputs, is_training=False)

    examples = jax.tree.leaves(batch)[0].shape[0]
    counted = count_flops(forward, params, batch)
    return Flops({path: flops // examples for path, flops in counted.items()})


def _totals(specs: Nested[ParameterSpec], flops: Flops) -> Iterator[str]:
    leaves = jax.tree.leaves(specs)
    size = sum(math.prod(s.shape) * _dtype(s).itemsize for s in leaves)
    of_state = _values([spec for spec in leaves if spec.is_state])
    state_text = f", and {of_state:,} values of state" if of_state else ""
    yield f"{_values(leaves) - of_state:,} parameters{state_text}, {display.bytes_text(size)}"
    of_activations = ""
    if flops[None]:
        count = display.count_text(flops[None])
        of_activations = f"including {count} for products of activations, as in attention; "
    yield (
        f"{display.count_text(flops.total())} FLOPs for the loss of an example, {of_activations}"
        "a training step takes about three times as many"
    )


def _cells(row: Row) -> tuple[str, str, str]:
    if row.kind or len(row.specs) != 1:
        return "", "", ""
    (spec,) = row.specs
    return (
        display.shape_text(spec.shape),
        _dtype(spec).name,
        display.layout_text(spec.partition_spec),
    )


def _within(path: str | None, above: str) -> bool:
    """Returns whether a parameter's path is at or below `above`; None belongs to the model."""
    return not above or (path is not None and f"{path}/".startswith(f"{above}/"))


def _values(specs: list[ParameterSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def _dtype(spec: ParameterSpec) -> np.dtype:
    return jnp.dtype(spec.dtype or jnp.float32)
