"""Training of a config in one call, with the numbers of its evaluations as the result."""

from weft.report.readings import outermost_scalars
from weft.trainer.trainer import SpmdTrainer


def train_and_evaluate(
    cfg: SpmdTrainer.Config, *, progress: bool = True
) -> dict[str, dict[str, float]]:
    """Trains a config, such as that of a recipe, and returns the numbers of its evaluations.

    All evalers run after the last step. A run whose `dir` has a checkpoint resumes.

    Args:
        cfg: Config of the run. It is not changed.
        progress: Whether to show the progress, see `SpmdTrainer.run`.

    Returns:
        For each evaler, by name, its loss and the metrics of the model; an empty dict if a signal
        stopped the run.

    Raises the errors of `SpmdTrainer.run`.

    >>> import tempfile
    >>> from weft.recipes.digits import digits
    >>> cfg = digits(steps=20, batch_size=64).set(dir=tempfile.mkdtemp())
    >>> numbers = train_and_evaluate(cfg, progress=False)
    >>> sorted(numbers["held_out"]), numbers["held_out"]["loss"] < 2.3
    (['accuracy', 'loss'], True)
    """
    trainer = cfg.instantiate(parent=None)
    result = trainer.run(
        return_evaler_summaries=bool(cfg.evalers), progress=progress
    )
    numbers: dict[str, dict[str, float]] = {}
    if result is None:
        return numbers
    for name, summaries in result.get("evaler_summaries", {}).items():
        numbers[name] = {}
        for metric, value in outermost_scalars(summaries).items():
            numbers[name][metric] = float(value)
    return numbers
