"""Eight experts replace each feed-forward layer of a language model, by its config.

`python examples/mixture_of_experts.py` takes two minutes on two cores and needs no download: the
text is Python code. The config of the dense model is that of the recipe `lm-tiny`. With one field
replaced, a router sends each token to two of eight experts of half the size: four times the weights
for the same arithmetic per token. A loss keeps the experts equally loaded.
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
    """Returns the recipe's config, with more text and larger batches."""
    cfg: Any = lm_tiny(steps=steps, batch_size=16)
    set_corpus(cfg, pattern="asyncio/*.py", held_out_fraction=0.1)
    return cfg


def with_experts(
    steps: int, balance: float = 0.01
) -> trainer.SpmdTrainer.Config:
    """Returns the same config with experts.

    Args:
        balance: Weight of the loss that is small if all experts get equally many tokens.
    """
    cfg: Any = dense(steps)
    transformer = cfg.model.decoder.transformer
    replaced = transformer.layer.feed_forward
    transformer.layer.feed_forward = (
        hierarchy.TransformerFeedForwardMoE.default_config().set(
            norm=replaced.norm,
            activation=replaced.activation,
            hidden_dim=hierarchy.scaled_hidden_dim(
                4 / 3
            ),  # 8 / 3 in the dense model
            num_experts=EXPERTS,
            num_groups=16,
            load_balance_loss_weight=balance,
            gating=hierarchy.Top2Gating.default_config().set(
                train_capacity_factor=3.0, eval_capacity_factor=4.0
            ),
            param_init=initializer(
                variance=1.0
            ),  # each expert's weights are those of a dense layer
        )
    )
    # The loop over layers passes the loss on, and the model adds it to its own.
    transformer.repeat.drop_output.rules = [r"module_outputs(?!.*/aux_loss$).*"]
    cfg.model.metrics = hierarchy.metrics_config(
        aux_loss_regex="decoder/transformer/.*/aux_loss"
    )
    return cfg.set(
        mesh_shape=(-1, 1, 1), mesh_axis_names=("data", "expert", "model")
    )


def unbalanced(steps: int) -> trainer.SpmdTrainer.Config:
    """Returns the config with experts, but without the loss on their load."""
    return with_experts(steps, balance=0.0)


def bars(load: np.ndarray) -> str:
    """Returns a bar for the load of each expert; half of the height is an equal share."""
    heights = np.clip(np.asarray(load) * EXPERTS * 4, 0, 7).astype(int)
    return "".join("▁▂▃▄▅▆▇█"[height] for height in heights)


def train(cfg: Any) -> str:
    """Trains, and returns the results on held-out files and the load of each layer's experts."""
    with tempfile.TemporaryDirectory() as directory:
        run = cfg.set(dir=directory).instantiate(parent=None)
        results: Any = run.run(return_evaler_summaries=True, progress=False)
    results = results["evaler_summaries"]["held_out"]
    size = sum(x.size for x in jax.tree.leaves(run.trainer_state.model))
    text = f"{size:,} parameters, {results['bits_per_byte'].mean:.3f} bits per byte"
    layers = results.get("decoder", {}).get("transformer", {}).get("repeat", {})
    for name, summaries in layers.items():
        load = summaries["feed_forward"]["gating"]["expert_load"].mean
        text += f"\n  {name} {bars(load)}  {load.min():.0%} to {load.max():.0%} of the tokens"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Trains some models, and prints how well they predict and how loaded their experts are."""
    configs = {
        "dense": dense,
        "experts": with_experts,
        "unbalanced": unbalanced,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=list(configs), help=", ".join(configs)
    )
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args(argv)
    for name in args.models:
        print(f"{name}: {train(configs[name](args.steps))}", flush=True)


if __name__ == "__main__":
    main()
