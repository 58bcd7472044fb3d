"""Files with the arrays of a checkpoint, for tests that look at them, damage or forge them."""

import shutil
from pathlib import Path

from weft.trainer.checkpointer.array_files import Value, read_tree
from weft.trainer.checkpointer.manifest import read_manifest, write_manifest


def values(step_dir: Path | str) -> dict[str, bytes]:
    """Returns the bytes of all headers and chunks of a checkpoint by name, such as "w/0.0"."""
    return {
        name: _bytes_of(Path(step_dir), value)
        for name, value in read_tree(str(step_dir), "arrays").items()
    }


def file_of(step_dir: Path | str, name: str) -> Path:
    """Returns the file that holds a value: that of the tree if the value is small."""
    path = read_tree(str(step_dir), "arrays")[name].path
    if path:
        return Path(step_dir, path)
    (file,) = Path(step_dir, "arrays", "d").iterdir()
    return file


def flip_a_bit_of(step_dir: Path | str, name: str) -> str:
    """Damages a value, which has a file; returns the path of that within the checkpoint."""
    value = read_tree(str(step_dir), "arrays")[name]
    with open(Path(step_dir, value.path), "r+b") as file:
        file.seek(value.offset + value.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return value.path


def split(step_dir: Path | str) -> None:
    """Gives each header and chunk its own file, as in checkpoints of Weft 0.2."""
    facts = read_manifest(str(step_dir)).facts
    files = values(step_dir)
    shutil.rmtree(Path(step_dir, "arrays"))
    for name, content in files.items():
        path = Path(step_dir, "arrays", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(str(step_dir), facts=facts)


def _bytes_of(step_dir: Path, value: Value) -> bytes:
    if value.content is not None:
        return value.content
    with open(step_dir / value.path, "rb") as file:
        file.seek(value.offset)
        return file.read(value.size)
