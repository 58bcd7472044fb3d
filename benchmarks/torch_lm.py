"""How fast is a training step through `SpmdTrainer`, against plain JAX unrolled and PyTorch?

All train the default recipe's model, and models of 0.1 to 10 M parameters, by AdamW from the same
values on the same data, and must give the same losses. They run alternately inside of one run of
the trainer: after each block of its steps, its listener lets each of the others run a block. These
wait in processes of their own, with the defaults of `malloc`, as they would run for their users;
Weft's process has the settings of `weft train`.
"""

import contextlib
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Protocol, SupportsFloat

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _raw_lm
from benchmarks.harness import Curve, Row, row
from weft.cli import keep_freed_memory
from weft.config import config_for_function
from weft.hierarchy import SlidingWindowAttentionBias
from weft.recipes import RECIPES
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook

PAIRS = 16


@dataclasses.dataclass(frozen=True)
class _Size:
    """A model: its name, sizes, the steps of a block, and the highest ratio to each other one.

    Without a name it is a point of the curve only.
    """

    name: str
    dim: int
    layers: int
    batch: int
    context: int
    block: int
    targets: dict[str, float] = dataclasses.field(default_factory=dict)

    def pairs(self) -> int:
        return PAIRS if self.name else PAIRS // 2


_SIZES = [
    _Size("", 48, 3, 16, 128, 16),
    _Size("lm", 96, 3, 16, 128, 16, {"plain JAX, unrolled": 1 / 2, "PyTorch, compiled": 1 / 0.7}),
    _Size("", 168, 3, 16, 128, 8),
    _Size("3.2 M parameters", 256, 4, 8, 256, 3, {"PyTorch, compiled": 1 / 0.8}),
    _Size("", 456, 4, 8, 256, 2),
]


def _config(size: _Size, directory: str) -> Any:
    cfg: Any = RECIPES[0]()
    decoder = cfg.model.decoder
    # The width of other layers, and the initializers, follow from that of the decoder.
    decoder.dim, decoder.transformer.num_layers = size.dim, size.layers
    attention = decoder.transformer.layer.self_attention.attention
    attention.mask = SlidingWindowAttentionBias.default_config(size.context - 1)
    cfg.input.source.set(sequence_length=size.context, global_batch_size=size.batch)
    never = config_for_function(every_n_steps_policy).set(n=10**9)
    cfg.checkpointer.save_policy = never
    steps = size.pairs() * size.block
    cfg.learner.optimizer.inner.learning_rate.warmup_steps = steps // 20
    return cfg.set(dir=directory, max_step=steps, evalers={})


class _Trainable(Protocol):
    def step(self, batch: dict[str, Any]) -> SupportsFloat: ...


class TorchModel:
    """The default recipe's model in PyTorch, and a step of its optimizer.

    Takes the parameters that `_raw_lm.from_weft` returns.
    """

    def __init__(self, params: dict[str, Any], schedule: Callable[[int], Any], *, compiled: bool):
        import torch

        def weight(x: Any) -> torch.Tensor:
            return torch.tensor(np.asarray(x), requires_grad=True)

        stacked, self.torch = params["layers"], torch
        num_layers = len(stacked["norm1"])
        self.embedding, self.final_norm = weight(params["embedding"]), weight(params["final_norm"])
        self.layers = [
            {name: weight(w[i]) for name, w in stacked.items()} for i in range(num_layers)
        ]
        weights = [self.embedding, self.final_norm, *(w for x in self.layers for w in x.values())]
        self.weights, self.schedule, self.count = weights, schedule, 0
        self.optimizer = torch.optim.AdamW(
            weights, lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        )
        self.loss = torch.compile(self._loss) if compiled else self._loss

    def _loss(self, ids: Any, labels: Any) -> Any:
        torch, fn = self.torch, self.torch.nn.functional
        batch, time_ = ids.shape
        heads, size = self.layers[0]["out"].shape[1:]
        angle = torch.arange(time_)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        cos, sin = torch.cos(angle), torch.sin(angle)

        def norm(x: Any, scale: Any) -> Any:
            return fn.rms_norm(x, (x.shape[-1],), scale, 1e-8)

        def rotate(x: Any) -> Any:
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        x = self.embedding[ids] * self.embedding.shape[1] ** 0.5
        for w in self.layers:
            h = norm(x, w["norm1"])
            qkv = [(h @ part.flatten(1)).view(batch, time_, heads, size) for part in w["qkv"]]
            q, k, v = (part.transpose(1, 2) for part in qkv)
            context = fn.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + context.transpose(1, 2).flatten(2) @ w["out"].flatten(1).T
            h = norm(x, w["norm2"])
            x = x + (fn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        logits = norm(x, self.final_norm) @ self.embedding.T
        return fn.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def step(self, batch: dict[str, Any]) -> SupportsFloat:
        """Trains on a batch of NumPy arrays; returns the loss."""
        torch = self.torch
        ids, labels, live = (
            torch.from_numpy(np.asarray(batch[name], np.int64))
            for name in ("input_ids", "target_labels", "live_targets")
        )
        labels = torch.where(live != 0, labels, -100)  # which PyTorch ignores
        self.optimizer.param_groups[0]["lr"] = float(self.schedule(self.count))
        self.count += 1
        self.optimizer.zero_grad()
        loss = self.loss(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        return loss.detach()


class _PlainJax:
    """The loop by hand, with all layers unrolled."""

    def __init__(self, params: dict[str, Any], peak_lr: float, max_step: int):
        self.params = jax.tree.map(jnp.copy, params)
        optimizer, self.run = _raw_lm.make_step(peak_lr, max_step, unroll=True)
        self.state = optimizer.init(self.params)

    def step(self, batch: dict[str, Any]) -> SupportsFloat:
        self.params, self.state, loss = self.run(self.params, self.state, batch)
        return loss


class _Products:
    """The products of matrices of a step and of its gradients, without anything between them."""

    def __init__(self, size: _Size, params: dict[str, Any]):
        layers, rows = params["layers"], size.batch * size.context
        heads, per_head = layers["out"].shape[2:]
        pairs = (size.batch * heads, size.context)
        self.shapes = [((rows, size.dim), params["embedding"].T.shape)]
        of_layer = [
            ((rows, size.dim), (size.dim, 3 * size.dim)),
            ((*pairs, per_head), (pairs[0], per_head, size.context)),
            ((*pairs, size.context), (*pairs, per_head)),
            ((rows, size.dim), (size.dim, size.dim)),
            *(((rows, layers[w].shape[1]), layers[w].shape[1:]) for w in ("gate", "up", "down")),
        ]
        self.shapes += of_layer * size.layers
        operands = [(jnp.ones(x), jnp.ones(w)) for x, w in self.shapes]
        results = [x @ w for x, w in operands]

        @jax.jit
        def products(operands: Any, results: Any) -> Any:
            y, transpose = jax.vjp(lambda pairs: [x @ w for x, w in pairs], operands)
            return y, transpose(results)

        self.run = lambda: jax.block_until_ready(products(operands, results))

    def step(self, batch: dict[str, Any]) -> SupportsFloat:
        self.run()
        return 0.0


def _plain_jax(
    size: _Size, params: dict[str, Any], peak_lr: float, max_step: int
) -> dict[str, _Trainable]:
    return {
        "plain JAX, unrolled": _PlainJax(params, peak_lr, max_step),
        "products": _Products(size, params),
    }


def _torch(
    size: _Size, params: dict[str, Any], peak_lr: float, max_step: int
) -> dict[str, _Trainable]:
    schedule = _raw_lm.schedule(peak_lr, max_step)
    return {
        "PyTorch, eager": TorchModel(params, schedule, compiled=False),
        "PyTorch, compiled": TorchModel(params, schedule, compiled=True),
    }


def _serve(connection: Connection, make: Callable[..., dict[str, _Trainable]], *args: Any) -> None:
    """Runs blocks of steps until there are no more; sends their losses and seconds."""
    trainables = make(*args)
    connection.send(list(trainables))
    while request := connection.recv():
        name, batches = request
        start = time.perf_counter()
        losses = list(map(float, [trainables[name].step(batch) for batch in batches]))
        connection.send((losses, time.perf_counter() - start))


@contextlib.contextmanager
def _process(make: Callable[..., dict[str, _Trainable]], *args: Any) -> Iterator[Connection]:
    """Yields a connection to a process that serves what `make` returns."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, *args), daemon=True)
    process.start()
    yield connection
    connection.send(None)
    process.join()


class _Alternating(Hook):
    """Measures blocks of the trainer's steps, each followed by a block of each of the others."""

    def __init__(self, size: _Size, stack: contextlib.ExitStack):
        self.size, self.stack = size, stack
        self.times: dict[str, list[float]] = {"Weft": []}
        self.losses: dict[str, list[float]] = {"Weft": []}
        self.others: dict[str, Connection] = {}

    def on_start(self, trainer, resumed_from):
        cfg = trainer.config
        params = _raw_lm.from_weft(jax.tree.map(np.asarray, trainer.trainer_state.model))
        self.parameters = sum(x.size for x in jax.tree.leaves(params))
        peak_lr = cfg.learner.optimizer.inner.learning_rate.peak_lr
        for make in (_plain_jax, _torch):
            process = _process(make, self.size, params, peak_lr, cfg.max_step)
            connection = self.stack.enter_context(process)
            for name in connection.recv():
                self.others[name] = connection
                self.times[name], self.losses[name] = [], []
        self.batches = iter(cfg.input.set(name="input").instantiate(parent=None).dataset())
        self.start = time.perf_counter()

    def on_step(self, step, outputs, batch):
        self.losses["Weft"].append(outputs["loss"])
        if step % self.size.block:
            return
        jax.block_until_ready(outputs)
        self.times["Weft"].append(time.perf_counter() - self.start)
        names = ("input_ids", "target_labels", "live_targets")
        batches = [
            {name: np.asarray(batch[name]) for name in names}
            for batch in (next(self.batches) for _ in range(self.size.block))
        ]
        for name, connection in self.others.items():
            connection.send((name, batches))
            losses, seconds = connection.recv()
            self.losses[name] += losses
            self.times[name].append(seconds)
        self.start = time.perf_counter()


def _measured(size: _Size) -> _Alternating:
    """Runs the blocks; returns the seconds of a step in each but the first, which compiles."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        listener = _Alternating(size, stack)
        _config(size, directory).instantiate(parent=None).run(listener=listener)
    losses = {name: np.array(listener.losses[name]) for name in listener.losses}
    for name in losses.keys() - {"Weft", "products"}:
        np.testing.assert_allclose(losses[name][0], losses["Weft"][0], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(losses[name], losses["Weft"], rtol=2e-2, err_msg=name)
    for name, seconds in listener.times.items():
        listener.times[name] = [each / size.block for each in seconds[1:]]
    return listener


def _rows(size: _Size, times: dict[str, list[float]]) -> list[Row]:
    tokens, rows = size.batch * size.context, []
    for name in times.keys() - {"Weft", "products"}:
        a, b = times["Weft"], times[name]
        floor = statistics.median(np.divide(times["products"], b))
        rates = " against ".join(f"{tokens / statistics.median(t):,.0f}" for t in (a, b))
        rows.append(
            row(
                f"a step of {size.name} / {name}",
                (np.divide(a, b).tolist(), a, b),
                at_most=size.targets.get(name),
                note=f"{rates} tokens/s; products of matrices alone {floor:.2g}",
                why=f"XLA's products of matrices alone, forward and backward, take {floor:.2g}; "
                "the others are passes over activations.",
            )
        )
    return sorted(rows, key=lambda each: each.question)


def _by_size(measured: list[_Alternating]) -> Curve:
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in measured:
        tokens, millions = each.size.batch * each.size.context, round(each.parameters / 1e6, 2)
        for name in each.times.keys() - {"products"}:
            rate = tokens / statistics.median(each.times[name])
            lines.setdefault(name, []).append((millions, rate))
    said = [
        f"{name}: from {points[0][1]:,.0f} tokens/s at {points[0][0]} M parameters to "
        f"{points[-1][1]:,.0f} at {points[-1][0]} M"
        for name, points in sorted(lines.items())
    ]
    title = "Training speed by the size of the model"
    return Curve("tokens_by_size", title, "million parameters", "tokens/s", lines, said)


def run() -> list[Row | Curve]:
    """Blocks of steps of the trainer against blocks of plain JAX and of PyTorch."""
    keep_freed_memory()
    measured = [_measured(size) for size in _SIZES]
    rows = [line for each in measured if each.size.name for line in _rows(each.size, each.times)]
    return [*rows, _by_size(measured)]
