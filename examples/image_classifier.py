"""A convolutional network with BatchNorm and Dropout classifies handwritten digits.

`python examples/image_classifier.py` takes ten seconds on two cores and needs no download: the
images, 8 × 8 pixels each, come with scikit-learn. What to look at: model, optimizer and metrics are
objects that a jitted function changes, so there is no state to hand around; `nnx.view` gives the
same variables in another mode.
"""

import argparse
import itertools
from collections.abc import Sequence

import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import nnx

BATCH = 64


class Net(nnx.Module):
    """Two convolutions, each with BatchNorm, then Dropout and a linear classifier."""

    def __init__(self, *, rngs: nnx.Rngs):
        sizes = (1, 32, 64)
        self.convs = [
            nnx.Conv(i, o, (3, 3), use_bias=False, rngs=rngs)
            for i, o in itertools.pairwise(sizes)
        ]
        self.norms = [
            nnx.BatchNorm(size, momentum=0.9, rngs=rngs) for size in sizes[1:]
        ]
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(2 * 2 * sizes[-1], 10, rngs=rngs)

    def __call__(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), strides=(2, 2))
        return self.out(self.dropout(x.reshape(len(x), -1)))


def loss_of(model, images, labels):
    """The loss, and the logits that it is the loss of."""
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, images, labels):
    """One step of the optimizer; the running statistics and the metrics move as well."""
    (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(
        model, images, labels
    )
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)


@nnx.jit
def eval_step(model, metrics, images, labels):
    """Adds the test images to the metrics."""
    loss, logits = loss_of(model, images, labels)
    metrics.update(loss=loss, logits=logits, labels=labels)


def new_metrics() -> nnx.MultiMetric:
    """Metrics of an epoch."""
    return nnx.MultiMetric(
        loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy()
    )


def read_digits() -> tuple[
    tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]
]:
    """Images in [0, 1] and labels: four fifths to train with, the others to test with."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = np.split(order, [len(images) * 4 // 5])
    return (images[train], digits.target[train]), (
        images[test],
        digits.target[test],
    )


def nearest_mean_accuracy(train, test) -> float:
    """The accuracy of choosing the digit whose mean image is nearest."""
    means = np.stack(
        [train[0][train[1] == digit].mean(0) for digit in range(10)]
    )
    distances = np.square(test[0][:, None] - means).sum((2, 3, 4))
    return float(np.mean(distances.argmin(1) == test[1]))


def drawing(images: np.ndarray) -> str:
    """Images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    pixels = shades[np.minimum((images * 5).astype(int), 4)].reshape(-1, 8, 8)
    return "\n".join(
        "  ".join("".join(p * 2 for p in row) for row in line)
        for line in pixels.transpose(1, 0, 2)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints loss and accuracy after each epoch, and mistakes at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(argv).epochs

    (images, labels), test = read_digits()
    print(f"{len(images)} images to train with, {len(test[0])} to test with")

    model = Net(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    # The same variables: what training changes is seen here.
    tested = nnx.view(model, deterministic=True, use_running_average=True)
    metrics, test_metrics = new_metrics(), new_metrics()
    rng = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        order = rng.permutation(len(images))
        for i in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[i : i + BATCH]
            train_step(model, optimizer, metrics, images[batch], labels[batch])
        eval_step(tested, test_metrics, *test)
        of_train, of_test = metrics.compute(), test_metrics.compute()
        metrics.reset()
        test_metrics.reset()
        print(
            f"epoch {epoch:2}  loss {of_train['loss']:.4f}  accuracy {of_train['accuracy']:.2%}"
            f"  test loss {of_test['loss']:.4f}  test accuracy {of_test['accuracy']:.2%}",
            flush=True,
        )
    print(
        f"the nearest mean image gets {nearest_mean_accuracy((images, labels), test):.2%}"
    )

    found = np.asarray(
        nnx.jit(lambda model, x: model(x))(tested, test[0])
    ).argmax(-1)
    wrong = np.flatnonzero(found != test[1])[:6]
    for i in wrong:
        print(
            f"a {test[1][i]} taken for a {found[i]}:",
            drawing(test[0][i : i + 1]),
            sep="\n",
        )


if __name__ == "__main__":
    main()
