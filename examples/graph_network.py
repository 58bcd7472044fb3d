"""A graph network classifies 1,797 handwritten digits after seeing the labels of 20.

`python examples/graph_network.py` takes ten seconds on two cores and needs no download: the images
come with scikit-learn. Each image is a node, and has edges to the images most similar to it. A
layer sums messages along the edges with `segment_sum`, so that images without a label count as
well. The same network without edges is the baseline.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import nnx


class Graph(NamedTuple):
    """Features of the nodes; for each edge the nodes at its ends, and a weight."""

    features: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    weights: np.ndarray


class GraphConv(nnx.Module):
    """Weighted sum of a linear map of the neighbors' features (Kipf and Welling, 2017)."""

    def __init__(self, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(in_features, out_features, rngs=rngs)

    def __call__(self, x, graph: Graph):
        messages = self.linear(x)[graph.senders] * graph.weights[:, None]
        return jax.ops.segment_sum(messages, graph.receivers, len(x))


class GraphNetwork(nnx.Module):
    """Logits of each node, from those at most as many edges away as there are layers."""

    def __init__(self, sizes: Sequence[int], *, rngs: nnx.Rngs):
        self.layers = [
            GraphConv(i, o, rngs=rngs) for i, o in itertools.pairwise(sizes)
        ]
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, graph: Graph):
        x = self.layers[0](graph.features, graph)
        for layer in self.layers[1:]:
            x = layer(self.dropout(nnx.relu(x)), graph)
        return x


def loss_of(model, graph, nodes, labels):
    """Returns the mean cross entropy of some nodes."""
    logits = model(graph)[nodes]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean()


@nnx.jit
def train_step(model, optimizer, graph, nodes, labels):
    """Updates the model and the optimizer, in place."""
    loss, grads = nnx.value_and_grad(loss_of)(model, graph, nodes, labels)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def predict(model, graph):
    """Returns the likeliest label of each node."""
    return nnx.view(model, deterministic=True)(graph).argmax(-1)


def neighbors(features: np.ndarray, k: int) -> Graph:
    """Returns a graph with edges from each node to itself and, both ways, to the k nearest."""
    squares = np.square(features).sum(1)
    distances = squares[:, None] + squares - 2 * features @ features.T
    nearest = np.argsort(distances, axis=1)[:, : k + 1]
    adjacent = np.zeros(distances.shape, bool)
    np.put_along_axis(adjacent, nearest, True, axis=1)
    adjacent |= adjacent.T | np.eye(len(features), dtype=bool)
    receivers, senders = np.nonzero(adjacent)
    degree = adjacent.sum(1).astype(np.float32)
    return Graph(
        features,
        senders,
        receivers,
        (degree[receivers] * degree[senders]) ** -0.5,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with and without edges, and prints the accuracy on the nodes without a label."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--labels", type=int, default=2, help="number of labels per digit"
    )
    parser.add_argument("--neighbors", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    images, digits = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32)
    order = np.random.default_rng(args.seed).permutation(len(digits))
    known = np.concatenate(
        [order[digits[order] == d][: args.labels] for d in range(10)]
    )
    hidden = np.setdiff1d(order, known)
    print(f"{len(known)} images with a label, {len(hidden):,} without")
    for k in (0, args.neighbors):
        graph = neighbors(images, k)
        print(
            f"{k} neighbors: {len(graph.senders) - len(images):,} edges between images"
        )
        model = GraphNetwork((64, 64, 64, 10), rngs=nnx.Rngs(args.seed))
        optimizer = nnx.Optimizer(
            model, optax.adamw(5e-3, weight_decay=1e-2), wrt=nnx.Param
        )
        for step in range(1, args.steps + 1):
            loss = train_step(model, optimizer, graph, known, digits[known])
            if step == 1 or step % 50 == 0:
                accuracy = np.mean(
                    np.asarray(predict(model, graph))[hidden] == digits[hidden]
                )
                print(
                    f"  step {step:4}  loss {loss:.4f}  accuracy without a label {accuracy:.2%}"
                )


if __name__ == "__main__":
    main()
