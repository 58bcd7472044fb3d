"""`weft inspect` and `weft report`: what the directory of a run holds.

`inspect` shows the contents of the newest checkpoint, read from its index, and with `--verify`
checks every file of every checkpoint. `report` writes the page of a run or of several.
"""

import argparse
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console

from weft.cli.configs import run_directory
from weft.errors import CheckpointNotFoundError, CommandLineError
from weft.report import display
from weft.report.page import REPORT_FILE, render_report
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_local_path, printable
from weft.trainer.checkpointer import dirs, manifest
from weft.trainer.checkpointer.index import Entry, Index, read_index_file
from weft.trainer.run_dir import CHECKPOINTS_DIR, check_places


def run(arguments: argparse.Namespace) -> int:
    """Prints the steps of the checkpoints, then the newest one's tree or the damaged files."""
    run = run_directory(arguments.dir)
    if not os.path.isdir(run):
        raise CommandLineError(f"{run!r} is not a directory. Name the directory of a run.")
    check_places(run)
    base_dir = os.path.join(run, CHECKPOINTS_DIR)
    found = dirs.step_dirs(base_dir)
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {base_dir!r}. Name the directory of a run that has saved."
        )
    console = display.table_console()
    if arguments.verify:
        return _verify(found, console)
    for step, directory in found.items():
        try:
            size = _size_of_files(directory)
        except FileNotFoundError:  # deleted by the run, which continues
            continue
        state = "" if manifest.has_manifest(directory) else "  incomplete: its manifest is missing"
        console.print(
            f"step {step:,}  {directory}  {display.bytes_text(size)}{state}", soft_wrap=True
        )
    step, directory = list(found.items())[-1]
    table = display.tree_table(
        f"step {step:,}", ["shape", "dtype", "layout", "bytes"], numbers=["bytes"]
    )
    index = read_index_file(directory)
    sizes = _sizes(index)
    for path, name, entry in display.tree_lines(index):
        table.add_row(name, *_cells(entry), f"{sizes[path]:,}")
    console.print(table)
    return 0


def _verify(found: Mapping[int, str], console: Console) -> int:
    """Prints whether each checkpoint is intact, and names every damaged file."""
    num_damaged = 0
    # A stranger's manifest may name any size.
    size = sum(manifest.recorded_bytes(directory) for directory in found.values())
    console.print(f"reading up to {display.bytes_text(size)}; Ctrl-C stops", soft_wrap=True)
    for step, directory in found.items():
        damage = manifest.find_damage(directory, step=step)
        num_damaged += bool(damage)
        num_files, size = (
            len(dirs.list_files(directory)),
            display.bytes_text(_size_of_files(directory)),
        )
        state = "DAMAGED" if damage else f"intact: {num_files:,} files, {size}"
        console.print(f"step {step:,}  {directory}  {state}", soft_wrap=True)
        for line in damage:
            console.print(f"  {line}", soft_wrap=True, markup=False)
    if num_damaged:
        console.print(
            f"{num_damaged} of {len(found)} checkpoints are damaged. A resumed run skips "
            "them; delete them, or restore their files from a copy."
        )
    return 1 if num_damaged else 0


def _size_of_files(directory: str) -> int:
    return sum(os.path.getsize(os.path.join(directory, f)) for f in dirs.list_files(directory))


def _sizes(index: Index) -> Counter[str]:
    """Returns the bytes of each array, and of all arrays below each name above them.

    >>> _sizes([("model/w", {"shape": [2, 3], "dtype": "float32", "spec": None})])
    Counter({'model': 24, 'model/w': 24})
    """
    sizes: Counter[str] = Counter()
    for path, entry in index:
        size = 0
        if isinstance(entry, Mapping) and "shape" in entry:
            # A PRNG key, such as key<fry>, is two words.
            is_key = entry["dtype"].startswith("key<")
            size = 8 if is_key else jnp.dtype(entry["dtype"]).itemsize
            size *= math.prod(entry["shape"])
        for name in itertools.accumulate(path.split("/"), "{}/{}".format):
            sizes[name] += size
    return sizes


def _cells(entry: Entry | None) -> tuple[str, str, str]:
    if entry is None:
        return "", "", ""
    if not isinstance(entry, Mapping):
        return repr(entry), type(entry).__name__, ""
    if "savable" in entry:
        return "", entry["savable"], ""
    return display.shape_text(entry["shape"]), entry["dtype"], display.layout_text(entry["spec"])


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
    else:
        out = Path(directories[0], REPORT_FILE) if len(directories) == 1 else Path(COMPARISON_FILE)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Directory(str(out.parent)).write(out.name, page)
    except OSError as error:
        raise CommandLineError(
            f"{str(out)!r} cannot be written: {error}. Name another file with --out."
        ) from error
    print(printable(f"report     {out}"))
    return 0
