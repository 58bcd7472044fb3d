"""Several processes train one model, as the machines of a cluster do.

`python examples/multi_process.py` starts two processes on this machine and takes half a minute on
two cores. Each process computes its rows of every batch, gradients are averaged over all rows, and
so all processes have the same parameters. One process (`--processes 1`) learns the same, but for
rounding. On a cluster, `srun python multi_process.py --dir /shared/run` joins its processes.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence

import jax
import numpy as np
from sklearn.datasets import load_digits

import weft
from weft import nnx
from weft.launch import LocalJob, joined_processes

BATCH = 64


class Classifier(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, width: int = 128, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(64, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def fingerprint(model: nnx.Module) -> str:
    """Returns a hash of the values of all parameters in this process."""
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in leaves)
    ).hexdigest()[:12]


def train(directory: str, steps: int) -> None:
    """Trains in this process, together with all others, and prints what it has in the end."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    model = Classifier(rngs=nnx.Rngs(0))
    result = weft.fit(
        model,
        (images[:1437], labels[:1437]),
        "cross_entropy",
        steps=steps,
        batch_size=BATCH,
        validation=(images[1437:], labels[1437:]),
        metrics="accuracy",
        learning_rate=3e-3,
        dir=directory,
        progress=False,
    )
    number = jax.process_index()
    if number == 0:
        validation = result.history.validation
        for step, accuracy in zip(
            validation["step"], validation["accuracy"], strict=True
        ):
            print(f"step {step:4}  test accuracy {accuracy:.2%}")
    rows = BATCH * jax.local_device_count() // jax.device_count()
    print(
        f"process {number}: {rows} of {BATCH} rows, parameters {fingerprint(model)}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes, or trains as one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dir", help="directory that all processes share")
    args = parser.parse_args(argv)
    if args.dir is not None:
        with joined_processes():  # before JAX is used
            train(args.dir, args.steps)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            __file__,
            "--dir",
            directory,
            "--steps",
            str(args.steps),
        ]
        job = LocalJob.default_config().set(name="digits", command=command)
        return job.set(num_processes=args.processes).instantiate().run()


if __name__ == "__main__":
    sys.exit(main())
