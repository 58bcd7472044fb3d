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
from weft.input import Input
from weft.report import display
from weft.trainer import SpmdTrainer, mesh, state
from weft.trainer.flops import Flops, count_flops
from weft.trainer.model import build_model
from weft.typing import Nested, NestedTensor, PyTree


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
    cfg = configs.load_config(
        arguments.recipe,
        arguments.overrides,
        keep_unreadable=True,
        **arguments.trust,
    )
    configs.check_is_read(
        cfg, "model", "weft inspect lists the parameters of a run."
    )
    cfg = configs.with_recorded_batch(cfg)
    model = build_model(cfg)
    specs = state.parameter_specs(model, mesh.rules_of(cfg).parameters)
    flops = forward_flops(cfg, model, specs)
    columns = ["class", "parameters", "FLOPs", "shape", "dtype", "layout"]
    table = display.tree_table(
        "module", columns, numbers=["parameters", "FLOPs"]
    )
    for row in rows("", model, specs):
        if row.path:
            name = row.path.rpartition("/")[2]
            depth = row.path.count("/") + 1
        else:
            name, depth = model.name, 0
        row_flops = 0
        for path, parameter_flops in flops.items():
            if _is_within(path, row.path):
                row_flops += parameter_flops
        table.add_row(
            "  " * depth + name,
            row.kind,
            f"{_num_values(row.specs):,}",
            display.count_text(row_flops),
            *_cells(row),
        )
    console = display.table_console()
    display.print_table(
        console, table, less_important=["class", "layout", "dtype"]
    )
    for line in _totals(specs, flops):
        display.print_words(console, line)
    return 0


def rows(
    path: str, module: Module | None, specs: Mapping[str, Any]
) -> Iterator[Row]:
    """Yields a row for each module that has parameters, and for each of these.

    Args:
        module: The module; None for one that a layer hides.
    """
    class_name = "" if module is None else type(module).__name__
    yield Row(path, class_name, jax.tree.leaves(specs))
    for name, child_specs in specs.items():
        child_path = f"{path}/{name}".lstrip("/")
        if isinstance(child_specs, ParameterSpec):
            yield Row(child_path, "", [child_specs])
        elif jax.tree.leaves(child_specs):
            child = None if module is None else module.children.get(name)
            yield from rows(child_path, child, child_specs)


def forward_flops(
    cfg: SpmdTrainer.Config, model: Module, specs: Nested[ParameterSpec]
) -> Flops:
    """Counts the operations of the loss of one example, by parameter path.

    Args:
        cfg: The trainer's config, whose input provides the batch's shapes.
    """
    input_: Input = cfg.input.set(name="input").instantiate(parent=None)
    batch = input_.element_spec()
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, _dtype(spec)), specs
    )

    def forward(params: NestedTensor, batch: NestedTensor) -> PyTree:
        inputs = {"input_batch": batch}
        return functional(
            model, prng_key=None, state=params, inputs=inputs, is_training=False
        )

    batch_size = jax.tree.leaves(batch)[0].shape[0]
    batch_flops = count_flops(forward, params, batch)
    return Flops(
        {path: flops // batch_size for path, flops in batch_flops.items()}
    )


def _totals(specs: Nested[ParameterSpec], flops: Flops) -> Iterator[str]:
    num_parameters = num_state_values = num_bytes = 0
    for spec in jax.tree.leaves(specs):
        num_bytes += math.prod(spec.shape) * _dtype(spec).itemsize
        if spec.is_state:
            num_state_values += math.prod(spec.shape)
        else:
            num_parameters += math.prod(spec.shape)
    state_text = (
        f", and {num_state_values:,} values of state"
        if num_state_values
        else ""
    )
    yield f"{num_parameters:,} parameters{state_text}, {display.bytes_text(num_bytes)}"
    activations_text = ""
    if flops[None]:
        count = display.count_text(flops[None])
        activations_text = (
            f"including {count} for products of activations, as in attention; "
        )
    yield (
        f"{display.count_text(flops.total())} FLOPs for the loss of an example, {activations_text}"
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


def _is_within(path: str | None, module_path: str) -> bool:
    """Returns whether a parameter belongs to a module; None is what belongs to the model alone."""
    if not module_path:
        return True
    return path is not None and f"{path}/".startswith(f"{module_path}/")


def _num_values(specs: list[ParameterSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)


def _dtype(spec: ParameterSpec) -> np.dtype:
    return jnp.dtype(spec.dtype or jnp.float32)
