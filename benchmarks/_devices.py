"""Measurements on several devices, in a process with eight virtual ones.

`python -m benchmarks._devices shards` prints as JSON what lies on each device, and
`... dispatch` what a call costs there.
"""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COUNTS = (1, 2, 4, 8)
_ROOT = Path(__file__).parents[1]


@functools.cache
def asked(what: str) -> Any:
    """Returns the answer of a process with eight virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._devices", what],
        cwd=_ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise RuntimeError(f"the process that was asked for {what!r} ended:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _trainer(n: int) -> Any:
    """Returns a trainer of the tiny recipe under FSDP on n devices, and its number of layers."""
    import jax

    from weft.recipes.lm import lm_tiny
    from weft.trainer.parallelism import ParallelismModifier

    cfg = lm_tiny().set(dir="", evalers={})
    cfg.model.decoder.set(dim=16)
    cfg.model.decoder.transformer.num_layers = 5  # unlike every other size
    cfg.model.decoder.transformer.layer.self_attention.attention.num_heads = 4
    cfg.model.decoder.transformer.layer.feed_forward.hidden_dim = 32
    cfg.input.source.set(sequence_length=16)
    cfg = ParallelismModifier.default_config().set(fsdp=n).instantiate()(cfg)
    return cfg.instantiate(parent=None, devices=jax.devices()[:n])


def _held(tree: Any) -> int:
    """Returns the bytes on the device that holds most."""
    import jax

    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())


def shards() -> dict[str, Any]:
    """Bytes per device by number of devices, and how many layers the largest gather brings."""
    import jax

    from weft.cli.collectives import collectives_of

    bytes_held, trainer = {}, None
    for n in COUNTS:
        trainer = _trainer(n)
        trainer.init(jax.random.key(0))
        state = trainer.trainer_state
        bytes_held[n] = _held((state.model, state.learner))
    assert trainer is not None
    layers = trainer.trainer_state_specs.model["decoder"]["transformer"]["repeat"]["layer"]
    shapes = [spec.shape for spec in jax.tree.leaves(layers)]
    text = trainer.compile_train_step().as_text()
    found = [c for c in collectives_of(text) if c.kind == "all-gather" and c.in_loop]
    sizes = {_size(shape) for c in found for shape in c.shapes}
    gathered = [shape for shape in shapes if math.prod(shape[1:]) in sizes]
    whole = [shape for shape in shapes if f"f32[{','.join(map(str, shape))}]" in text]
    return {"bytes": bytes_held, "params": len(shapes), "one": len(gathered), "all": len(whole)}


def _size(shape: str) -> int:
    return math.prod(int(n) for n in shape.partition("[")[2].rstrip("]").split(",") if n)


def dispatch() -> dict[int, dict[str, list[float]]]:
    """Returns seconds of a call of a function that changes 100 sharded arrays: by number of devices
    and library, of each round.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks._growth import in_rounds
    from benchmarks.libraries import libraries
    from benchmarks.libraries.raw import RAW, chain_values

    compared = (RAW, *(x for x in libraries() if hasattr(x, "nnx")))
    found: dict[int, dict[str, list[float]]] = {}
    times = 20
    for n in COUNTS:
        sharding = NamedSharding(Mesh(jax.devices()[:n], "x"), PartitionSpec("x"))
        values = jax.device_put(chain_values(50, 8), sharding)
        steps = {x.name: x.shrinking(values, plain=True).get("") for x in compared}

        def many(step: Any) -> None:
            for _ in range(times):
                step()

        fns = {name: (lambda s=step: many(s)) for name, step in steps.items() if step}
        measured = in_rounds(fns, rounds=9)
        found[n] = {name: [x / times for x in of] for name, of in measured.items()}
    return found


if __name__ == "__main__":
    print(json.dumps({"shards": shards, "dispatch": dispatch}[sys.argv[1]]()))
