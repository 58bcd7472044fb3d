"""Runs of the evalers that are due after a step."""

from collections.abc import Collection, Mapping
from typing import Any

from weft.trainer.eval_policy import AtEndPolicy
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.progress import RunListener
from weft.typing import NestedTensor, Tensor


def run_evalers(
    evalers: Mapping[str, SpmdEvaler],
    *,
    step: int,
    prng_key: Tensor,
    model_params: NestedTensor,
    train_summaries: Mapping[str, Any] | None,
    listener: RunListener,
    forced: Collection[str] | None = None,
) -> dict[str, Any]:
    """Runs the evalers that are due, or only the `forced`; returns their summaries by name.

    The policy of each evaler receives the summaries of those before it.
    """
    results: dict[str, Any] = {}
    for name, evaler in evalers.items():
        if forced is not None and name not in forced:
            continue
        _, summaries, _ = evaler.eval_step(
            step,
            prng_key=prng_key,
            model_params=model_params,
            train_summaries={**(train_summaries or {}), "evalers": results},
            force_run=forced is not None,
        )
        if summaries is not None:
            results[name] = summaries
            listener.on_eval(name, step, summaries)
    return results


def due_at_end(evalers: Mapping[str, SpmdEvaler]) -> set[str]:
    """Returns the names of the evalers whose policy is an `AtEndPolicy`."""
    return {name for name, evaler in evalers.items() if isinstance(evaler.eval_policy, AtEndPolicy)}
