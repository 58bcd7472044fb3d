"""`weft inspect` and `weft report`: what the directory of a run holds.

`inspect` shows the contents of the newest checkpoint, read from its index, and with `--verify`
checks every file of every checkpoint. Of a Hugging Face folder, it shows which parameter each
tensor becomes. `report` writes the page of a run or of several.
"""

import argparse
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from weft import hierarchy
from weft.cli.configs import parse_mesh, run_directory
from weft.errors import CheckpointNotFoundError, CommandLineError
from weft.interop.huggingface import (
    FolderContents,
    folder_contents,
    huggingface_model_config,
    parameter_shapes,
)
from weft.report import display
from weft.report.page import REPORT_FILE, render_report
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_local_path, printable
from weft.trainer import run_dir
from weft.trainer.checkpointer import dirs, manifest
from weft.trainer.checkpointer.index import Entry, Index, read_index_file
from weft.trainer.run_dir import CHECKPOINTS_DIR, check_places


def run(arguments: argparse.Namespace) -> int:
    """Prints the steps of the checkpoints, then the newest one's tree or the damaged files."""
    run = run_directory(arguments.dir)
    if not os.path.isdir(run):
        raise CommandLineError(
            f"{run!r} is not a directory. Name the directory of a run."
        )
    check_places(run)
    is_folder = os.path.exists(os.path.join(run, "config.json"))
    if is_folder and not run_dir.was_started(run):
        return _inspect_folder(arguments, run)
    if arguments.mesh is not None:
        raise CommandLineError(
            f"--mesh shows the layouts of a Hugging Face folder, and {run!r} is the directory of a "
            "run, whose checkpoints have their own; leave it out."
        )
    base_dir = os.path.join(run, CHECKPOINTS_DIR)
    checkpoints = dirs.step_dirs(base_dir)
    if not checkpoints:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {base_dir!r}. Name the directory of a run that has saved."
        )
    console = display.table_console()
    if arguments.verify:
        return _verify(checkpoints, console)
    for step, directory in checkpoints.items():
        try:
            size_text = display.bytes_text(_size_of_files(directory))
        except FileNotFoundError:  # deleted by the run, which continues
            continue
        line = f"step {step:,}  {directory}  {size_text}"
        if not manifest.has_manifest(directory):
            line += "  incomplete: its manifest is missing"
        console.print(line, soft_wrap=True)
    step, directory = list(checkpoints.items())[-1]
    table = display.tree_table(
        f"step {step:,}",
        ["shape", "dtype", "layout", "bytes"],
        numbers=["bytes"],
    )
    index = read_index_file(directory)
    sizes = _sizes(index)
    for path, name, entry in display.tree_lines(index):
        table.add_row(name, *_cells(entry), f"{sizes[path]:,}")
    display.print_table(console, table, less_important=["layout", "dtype"])
    return 0


def _inspect_folder(arguments: argparse.Namespace, folder: str) -> int:
    """Prints where the tensors of a Hugging Face folder go; returns 1 if they do not fit."""
    if arguments.verify:
        raise CommandLineError(
            f"--verify checks the checkpoints of a run, and {folder!r} is a Hugging Face folder, "
            "whose files have no digests; leave it out."
        )
    cfg = huggingface_model_config(folder)
    mesh = None
    if arguments.mesh is not None:
        sizes = parse_mesh(arguments.mesh)
        if -1 in sizes.values():
            raise CommandLineError(
                f"--mesh {arguments.mesh!r} leaves a size to the devices of a run; write each size."
            )
        mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
        hierarchy.set_partition_specs_recursively(cfg, mesh.axis_names)
    contents = folder_contents(folder, parameter_shapes(cfg, mesh))
    console = display.table_console()
    files = {tensor.file for tensor in contents.tensors.values()}
    size_text = display.bytes_text(sum(map(os.path.getsize, files)))
    console.print(
        f"{contents.model_type}  {folder}  {len(contents.tensors):,} tensors in "
        f"{len(files):,} {'file' if len(files) == 1 else 'files'}, {size_text}",
        soft_wrap=True,
        markup=False,
    )
    table = display.tree_table(
        "tensor in the files",
        ["rows", "stored as", "parameter", "shape", "dtype", "layout"],
        numbers=[],
    )
    for row in contents.parameters:
        sharding = getattr(row.parameter, "sharding", None)
        rows_text = "" if row.rows is None else f"{row.rows[0]}:{row.rows[1]}"
        table.add_row(
            printable(row.pattern),
            rows_text,
            ", ".join(row.dtypes),
            row.path,
            display.shape_text(row.parameter.shape),
            jnp.dtype(row.parameter.dtype).name,
            "" if sharding is None else display.layout_text(sharding.spec),
        )
    display.print_table(
        console, table, less_important=["rows", "dtype", "layout", "stored as"]
    )
    return _print_faults(contents, console)


def _print_faults(contents: FolderContents, console: Console) -> int:
    """Prints tensors that do not become parameters; returns 1 if loading refuses the folder."""
    lines: list[str] = []
    for name in contents.unused:
        shape_text = display.shape_text(contents.tensors[name].shape)
        state = "unused"
        if name in contents.refused:
            state = "unexpected"
        lines.append(f"{state}  {name} {shape_text}")
    for name, expected in contents.missing.items():
        lines.append(f"missing  {name} {display.shape_text(expected.shape)}")
    for name, expected in contents.misshaped.items():
        shape_text = display.shape_text(contents.tensors[name].shape)
        lines.append(
            f"shape  {name} {shape_text} in the file, "
            f"{display.shape_text(expected.shape)} wanted"
        )
    for line in lines:
        console.print(printable(line), soft_wrap=True, markup=False)
    is_refused = contents.refused or contents.missing or contents.misshaped
    return 1 if is_refused else 0


def _verify(checkpoints: Mapping[int, str], console: Console) -> int:
    """Prints whether each checkpoint is intact, and names every damaged file."""
    # A stranger's manifest may name any size.
    num_bytes = sum(map(manifest.recorded_bytes, checkpoints.values()))
    console.print(
        f"reading up to {display.bytes_text(num_bytes)}; Ctrl-C stops",
        soft_wrap=True,
    )
    num_damaged = 0
    for step, directory in checkpoints.items():
        damage = manifest.find_damage(directory, step=step)
        if damage:
            num_damaged += 1
            state = "DAMAGED"
        else:
            num_files = len(dirs.list_files(directory))
            size_text = display.bytes_text(_size_of_files(directory))
            state = f"intact: {num_files:,} files, {size_text}"
        console.print(f"step {step:,}  {directory}  {state}", soft_wrap=True)
        for line in damage:
            console.print(f"  {line}", soft_wrap=True, markup=False)
    if num_damaged == 0:
        return 0
    console.print(
        f"{num_damaged} of {len(checkpoints)} checkpoints are damaged. A resumed run skips "
        "them; delete them, or restore their files from a copy."
    )
    return 1


def _size_of_files(directory: str) -> int:
    paths = [
        os.path.join(directory, name) for name in dirs.list_files(directory)
    ]
    return sum(map(os.path.getsize, paths))


def _sizes(index: Index) -> Counter[str]:
    """Returns the bytes of each array, and of all arrays below each name above them.

    >>> _sizes([("model/w", {"shape": [2, 3], "dtype": "float32", "spec": None})])
    Counter({'model': 24, 'model/w': 24})
    """
    sizes: Counter[str] = Counter()
    for path, entry in index:
        size = 0
        if isinstance(entry, Mapping) and "shape" in entry:
            is_key = entry["dtype"].startswith(
                "key<"
            )  # such as key<fry>, of two words
            bytes_per_value = (
                8 if is_key else jnp.dtype(entry["dtype"]).itemsize
            )
            size = bytes_per_value * math.prod(entry["shape"])
        names = path.split("/")
        for depth in range(1, len(names) + 1):
            sizes["/".join(names[:depth])] += size
    return sizes


def _cells(entry: Entry | None) -> tuple[str, str, str]:
    if entry is None:
        return "", "", ""
    if not isinstance(entry, Mapping):
        return repr(entry), type(entry).__name__, ""
    if "savable" in entry:
        return "", entry["savable"], ""
    return (
        display.shape_text(entry["shape"]),
        entry["dtype"],
        display.layout_text(entry["spec"]),
    )


COMPARISON_FILE = "comparison.html"


def write_report(arguments: argparse.Namespace) -> int:
    """Writes the page and prints its path.

    Raises:
        CommandLineError: if it cannot be written.
        RunDirError: if a directory is not that of a run.
    """
    check_local_path(arguments.out or "", "--out")
    directories = [run_directory(name) for name in arguments.dirs]
    page = render_report(*directories)
    if arguments.out:
        out = Path(arguments.out)
    elif len(directories) == 1:
        out = Path(directories[0], REPORT_FILE)
    else:
        out = Path(COMPARISON_FILE)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Directory(str(out.parent)).write(out.name, page)
    except OSError as error:
        raise CommandLineError(
            f"{str(out)!r} cannot be written: {error}. Name another file with --out."
        ) from error
    print(printable(f"report     {out}"))
    return 0
