"""Optuna looks for the hyperparameters of a network of handwritten digits, each trial a `weft.fit`.

`pip install '.[train,examples,optuna]'`, then `python examples/optuna_study.py`, which takes a
minute on two cores. What to look at: the objective is a function that trains and returns a number.
A hook reports each evaluation, so that Optuna ends trials that are worse than others at the same
step. Every trial has a directory, which `weft report` compares, and the study is a database in a
file: started again, the program adds further trials.

`weft sweep` needs no program, and tries a grid or random settings of a recipe.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from sklearn.datasets import load_digits

import weft
from weft import linen as nn
from weft.trainer import Hook

EPOCHS = 6


class Net(nn.Module):
    """A network of two hidden layers."""

    width: int
    dropout: float

    @nn.compact
    def __call__(self, x, training: bool):
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
            x = nn.Dropout(self.dropout, deterministic=not training)(x)
        return nn.Dense(10)(x)


class PruneTrial(Hook):
    """Reports the loss of each evaluation, and ends a trial that Optuna gives up."""

    def __init__(self, trial: optuna.Trial):
        self.trial = trial

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        self.trial.report(float(summaries["loss"].mean), step)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def data(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images of a split and their digits."""
    digits: Any = load_digits()
    x, y = digits.data, digits.target
    images = (x / 16).astype(np.float32)
    rows = slice(0, 1400) if split == "train" else slice(1400, None)
    return images[rows], y[rows]


def objective(trial: optuna.Trial) -> float:
    """Trains with the hyperparameters of a trial, and returns the best loss on unseen images."""
    model = Net(
        width=trial.suggest_int("width", 16, 128, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
    )
    result = weft.fit(
        model,
        data("train"),
        "cross_entropy",
        epochs=EPOCHS,
        validation=data("held_out"),
        metrics="accuracy",
        learning_rate=trial.suggest_float(
            "learning_rate", 1e-4, 1e-1, log=True
        ),
        callbacks=[PruneTrial(trial)],
        dir=f"runs/{trial.study.study_name}/{trial.number:03}",
        progress=False,
    )
    return float(result.history.validation["loss"].min())


def main(argv: Sequence[str] | None = None) -> None:
    """Runs further trials of the study, and prints its best one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--name", default="digits")
    parser.add_argument("--storage", default="sqlite:///study.db")
    arguments = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=arguments.name,
        storage=arguments.storage,
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    study.optimize(objective, n_trials=arguments.trials)
    states = [trial.state for trial in study.trials]
    num_pruned = states.count(optuna.trial.TrialState.PRUNED)
    print(f"{len(states)} trials, {num_pruned} of them ended early")
    best = study.best_trial
    print(f"best loss {best.value:.3f} in trial {best.number}:")
    for name, value in best.params.items():
        print(f"  {name}={value:.3g}")
    print(f"weft report runs/{arguments.name}/*  compares them")


if __name__ == "__main__":
    main()
