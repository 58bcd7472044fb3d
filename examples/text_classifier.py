"""A text classifier says which package of Python's library a function comes from.

`python examples/text_classifier.py` takes 20 seconds on two cores. What to look at: the classes
are of different sizes, so macro-F1 counts. It is not a mean over rows: `F1Score("macro")` adds up
over batches. `fit` keeps the checkpoint with the best one, which is exported to a safetensors file
and read into a new model. Held out are whole files, and names of the packages are left out.
"""

import argparse
import ast
import re
import sysconfig
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import classification_report

import weft
from weft import nnx
from weft.metrics import F1Score
from weft.serialization import load_safetensors, save_safetensors

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "logging", "unittest")
WORDS = 4096  # rows of the table; words share them by their hash
LENGTH = 128  # words of a function that are read


class TextClassifier(nnx.Module):
    """Classifies a text by the mean of the embeddings of its words."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, words):
        is_word = (words > 0)[..., None]  # 0 is padding
        total = jnp.sum(self.embed(words), axis=1, where=is_word)
        mean = total / jnp.maximum(is_word.sum(axis=1), 1)
        x = nnx.relu(self.hidden(self.dropout(mean)))
        return self.out(x)


def functions(path: Path) -> list[str]:
    """Returns the source of each function of a file."""
    source = path.read_text(encoding="utf-8")
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            texts.append(ast.get_source_segment(source, node) or "")
    return texts


def word_ids(text: str) -> np.ndarray:
    """Returns the rows of a text's words in the table, [LENGTH]."""
    ids = np.zeros(LENGTH, np.int32)
    words = re.findall(r"[a-zA-Z]+|[^\sa-zA-Z]", text.lower())
    words = [word for word in words if word not in PACKAGES]
    for position, word in enumerate(words[:LENGTH]):
        ids[position] = 1 + zlib.crc32(word.encode()) % (WORDS - 1)
    return ids


def load(packages: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the functions of packages, a quarter of the files held out."""
    library = Path(sysconfig.get_path("stdlib"))
    rows = {"train": [], "held_out": []}
    for label, package in enumerate(packages):
        for path in sorted((library / package).rglob("*.py")):
            name = path.relative_to(library).as_posix()
            part = "train" if zlib.crc32(name.encode()) % 4 else "held_out"
            for text in functions(path):
                rows[part].append((word_ids(text), label))
    parts = {}
    for part, examples in rows.items():
        words, labels = zip(*examples, strict=True)
        parts[part] = {"words": np.stack(words), "label": np.array(labels)}
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, exports the best checkpoint, and reports by package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dir", type=Path, help="default: a temporary folder")
    arguments = parser.parse_args(argv)
    folder = arguments.dir or Path(tempfile.mkdtemp())

    parts = load(PACKAGES)
    held_out = parts["held_out"]
    model = TextClassifier(64, len(PACKAGES), rngs=nnx.Rngs(0))
    result = weft.fit(
        model,
        parts["train"],
        "cross_entropy",
        epochs=arguments.epochs,
        batch_size=64,
        learning_rate=3e-3,
        validation=held_out,
        metrics={"macro_f1": F1Score("macro"), "accuracy": "accuracy"},
        best="macro_f1",
        dir=str(folder / "run"),
    )
    print(f"best at step {result.best.step}: macro-F1 {result.best.value:.3f}")

    file = str(folder / "best.safetensors")
    result.best.update(model)
    save_safetensors(file, nnx.state(model, nnx.Param))

    # Elsewhere: a new model, and the values of the file in place of its own.
    other = TextClassifier(64, len(PACKAGES), rngs=nnx.Rngs(1))
    params = nnx.state(other, nnx.Param)
    nnx.update(other, load_safetensors(file, params))
    other.eval()
    predicted = jax.jit(other)(held_out["words"]).argmax(axis=-1)
    print(f"predictions of a model that read {file}:")
    print(
        classification_report(
            held_out["label"], predicted, target_names=PACKAGES, digits=3
        )
    )


if __name__ == "__main__":
    main()
