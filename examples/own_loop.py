"""A training loop of one's own on eight devices, with sharded data and parameters.

`python examples/own_loop.py` takes ten seconds on two cores. What to look at: the layers of the
network name a mesh axis for each axis of their kernels, and nothing else in the program depends on
the number of devices. The same loop runs on a mesh of one device and on one of 4 × 2, and learns
the same up to rounding. The devices are virtual, parts of the CPU. The images are scikit-learn's.
"""

import argparse
import os
from collections.abc import Sequence

# Before JAX starts; the flag does not change what accelerators JAX finds. The last one of a name
# counts, so this replaces a number that the environment has.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from weft import nnx

BATCH = 64


class MLP(nnx.Module):
    """Classifies images; its hidden units are split over the axis `model`."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        columns = {"out_sharding": (None, "model")}
        rows = {"out_sharding": ("model", None)}
        self.up = nnx.Linear(64, width, kernel_metadata=columns, rngs=rngs)
        self.down = nnx.Linear(width, 10, kernel_metadata=rows, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def train_step(model, optimizer, images, labels):
    """Updates the model by one batch, and returns the loss before."""

    def loss_of(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(images), labels
        )
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(mesh: Mesh, images, labels, steps: int) -> tuple[MLP, np.ndarray]:
    """Trains a model on a mesh; returns it and the loss of each step."""
    over_data = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(0)
    losses = []
    with jax.set_mesh(mesh):
        # In `jit`, each device makes only its own part of the parameters.
        model = nnx.jit(lambda: MLP(128, nnx.Rngs(0)))()
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        for _ in range(steps):
            rows = rng.integers(0, len(images), BATCH)
            batch = jax.device_put((images[rows], labels[rows]), over_data)
            losses.append(train_step(model, optimizer, *batch))
    return model, np.array(losses)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on one device and on eight, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(argv).steps

    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    test_images, test_labels = images[:400], labels[:400]
    images, labels = images[400:], labels[400:]

    losses_by_mesh = {}
    models = {}
    for shape in ((1, 1), (4, 2)):
        count = shape[0] * shape[1]
        mesh = jax.make_mesh(
            shape,
            ("data", "model"),
            axis_types=(AxisType.Auto, AxisType.Auto),
            devices=jax.devices("cpu")[:count],
        )
        model, losses = train(mesh, images, labels, steps)
        predicted = model(test_images).argmax(axis=-1)
        accuracy = jnp.mean(predicted == test_labels)
        kernel = model.up.kernel
        part = kernel.addressable_shards[0].data.shape
        print(
            f"{count} devices: {part} of the kernel {kernel.shape} on each, "
            f"test accuracy {accuracy:.2%}"
        )
        losses_by_mesh[shape], models[shape] = losses, model

    print("step  one device  4 × 2 devices")
    one, eight = losses_by_mesh.values()
    for step in np.unique(np.linspace(0, steps - 1, 6).astype(int)):
        print(f"{step:4}  {one[step]:10.6f}  {eight[step]:13.6f}")
    differences = jax.tree.map(
        lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(),
        *(nnx.to_pure_dict(nnx.state(model)) for model in models.values()),
    )
    largest = max(jax.tree.leaves(differences))
    print(f"largest difference between two parameters {largest:.1e}")


if __name__ == "__main__":
    main()
