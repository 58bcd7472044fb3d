"""Eight small classifiers, trained side by side by one `nn.vmap`, are better than any of them.

`python examples/ensemble.py` takes a few seconds. What to look at: the ensemble is a module
like any other. Its parameters have a leading axis of members, and `split_rngs` says that each
member begins with parameters, and drops units, of its own. The data are scikit-learn's digits; few
of them are trained on, so that a single member is often wrong and too sure of itself.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import rich.table
from sklearn.datasets import load_digits

from weft import linen as nn
from weft.training.train_state import TrainState

MEMBERS = 8


class Classifier(nn.Module):
    """A perceptron with one hidden layer and dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


# `in_axes` is for the arguments: all members see the same images.
Ensemble = nn.vmap(
    Classifier,
    variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True},
    in_axes=(None, None),
    axis_size=MEMBERS,
)


@jax.jit
def train_step(state, images, labels, key):
    """One step of the optimizer, for all members at once."""

    def loss_of(params):
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        logits = state.apply_fn({"params": params}, images, True, rngs=rngs)
        labels_of_all = jnp.broadcast_to(labels, logits.shape[:-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, labels_of_all
        )
        return losses.mean(axis=1).sum(), losses.mean()

    (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss


def calibration_error(
    probabilities: np.ndarray, labels: np.ndarray, bins: int = 10
) -> float:
    """By how much sureness and accuracy differ, on average over bins of equal sureness."""
    sureness, right = probabilities.max(1), probabilities.argmax(1) == labels
    bin_of = np.minimum((sureness * bins).astype(int), bins - 1)
    gaps = [
        abs(np.sum(right[bin_of == b]) - np.sum(sureness[bin_of == b]))
        for b in range(bins)
    ]
    return float(sum(gaps) / len(labels))


def quality(
    probabilities: np.ndarray, labels: np.ndarray
) -> tuple[float, float, float]:
    """Accuracy, negative log-likelihood and calibration error."""
    of_labels = probabilities[np.arange(len(labels)), labels]
    accuracy = np.mean(probabilities.argmax(1) == labels)
    return (
        float(accuracy),
        float(-np.log(of_labels).mean()),
        calibration_error(probabilities, labels),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the ensemble and compares it with its members."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(argv).steps

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:200], order[200:]

    model = Ensemble()
    params = model.init(jax.random.key(0), images[:1], False)["params"]
    print("shapes:", jax.tree.map(jnp.shape, params))
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-2)
    )
    for step in range(1, steps + 1):
        state, loss = train_step(
            state, images[train], labels[train], jax.random.key(1)
        )
        if step in (1, steps) or step % 100 == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)

    logits = jax.jit(model.apply, static_argnums=2)(
        {"params": state.params}, images[test], False
    )
    of_members = np.asarray(jax.nn.softmax(logits))
    each = np.array([quality(one, labels[test]) for one in of_members])
    table = rich.table.Table(
        "", "accuracy", "negative log-likelihood", "calibration error"
    )
    rows = {
        "mean of members": each.mean(0),
        "best member": (each[:, 0].max(), each[:, 1].min(), each[:, 2].min()),
        "ensemble": quality(of_members.mean(0), labels[test]),
    }
    for name, (accuracy, likelihood, error) in rows.items():
        table.add_row(
            name, f"{accuracy:.2%}", f"{likelihood:.3f}", f"{error:.3f}"
        )
    rich.print(table)


if __name__ == "__main__":
    main()
