"""Which evalers run after a step, and what they find."""

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
    """Runs the evalers that are due, or those that are `forced` and no others.

    Args:
        evalers: by name. The policy of each sees what those before it found.
        step: that was run.
        prng_key: for each of them.
        model_params: the parameters.
        train_summaries: what the step reported.
        listener: is told what they find.
        forced: the names of those that run whatever their policy says.

    Returns:
        The summaries of those that ran, by name.
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
    """The names of the evalers whose policy is to run at the end.

    Args:
        evalers: by name.
    """
    return {name for name, evaler in evalers.items() if isinstance(evaler.eval_policy, AtEndPolicy)}
