"""A language model gets eight experts in place of each feed-forward layer, by its config.

`python examples/mixture_of_experts.py` takes two minutes on two cores and needs no download. The
config of a dense model comes from the recipe `lm-tiny`, which reads Python code. One field of it is
replaced: a router then sends each token to two of eight experts of half the size, for the same
arithmetic per token with four times the parameters. A loss keeps the load of the experts balanced.
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from weft import hierarchy, trainer
from weft.recipes.lm import initializer, lm_tiny, set_corpus

EXPERTS = 8


def dense(steps: int) -> trainer.SpmdTrainer.Config:
    """Returns the recipe's config with a wider model."""
    cfg: Any = lm_tiny(steps=steps, batch_size=16)
    set_corpus(cfg, pattern="asyncio/*.py", held_out_fraction=0.1)
    return cfg


def with_experts(steps: int, balance: float) -> trainer.SpmdTrainer.Config:
    """Returns the same config, except for the feed-forward layers.

    Args:
        balance: Weight of the loss that is small if all experts get equally many tokens.
    """
    cfg: Any = dense(steps)
    transformer = cfg.model.decoder.transformer
    replaced = transformer.layer.feed_forward
    transformer.layer.feed_forward = hierarchy.TransformerFeedForwardMoE.default_config().set(
        norm=replaced.norm,
        activation=replaced.activation,
        hidden_dim=hierarchy.scaled_hidden_dim(4 / 3),  # 8 / 3 in the dense model
        num_experts=EXPERTS,
        num_groups=16,
        load_balance_loss_weight=balance,
        gating=hierarchy.Top2Gating.default_config().set(
            train_capacity_factor=3.0, eval_capacity_factor=4.0
        ),
        # Experts start like dense layers.
        param_init=initializer(variance=1.0),
    )
    # The loop over layers passes the loss on, and the model adds it to its own.
    transformer.repeat.drop_output.rules = [r"module_outputs(?!.*/aux_loss$).*"]
    cfg.model.metrics = hierarchy.metrics_config(aux_loss_regex="decoder/transformer/.*/aux_loss")
    return cfg.set(mesh_shape=(-1, 1, 1), mesh_axis_names=("data", "expert", "model"))


def bars(load: np.ndarray) -> str:
    """Returns a bar for the share of each expert; half the height is an equal share."""
    heights = np.clip(np.asarray(load) * EXPERTS * 4, 0, 7.99).astype(int)
    return "".join("▁▂▃▄▅▆▇█"[height] for height in heights)


def run(cfg: trainer.SpmdTrainer.Config) -> str:
    """Trains, and returns the figures of the held-out files and the load of the experts."""
    with tempfile.TemporaryDirectory() as directory:
        lm = cfg.set(dir=directory).instantiate(parent=None)
        result: Any = lm.run(return_evaler_summaries=True, progress=False)["held_out"]
    size = sum(x.size for x in jax.tree.leaves(lm.trainer_state.model))
    text = f"{size:9,} parameters  {result['bits_per_byte'].mean:.3f} bits per byte"
    for name, layer in result.get("decoder", {}).get("transformer", {}).get("repeat", {}).items():
        gating = layer["feed_forward"]["gating"]
        load = gating["expert_load"].mean
        text += f"\n    {name} {bars(load)}  {load.min():5.1%} to {load.max():5.1%} per expert"
        text += f", {gating['dropped_tokens']:.1%} of tokens without one"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Trains without experts, with them, and with unbalanced ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    steps = parser.parse_args(argv).steps
    print(f"dense          {run(dense(steps))}", flush=True)
    print(f"experts        {run(with_experts(steps, balance=0.01))}", flush=True)
    print(f"not balanced   {run(with_experts(steps, balance=0.0))}", flush=True)


if __name__ == "__main__":
    main()
