"""`weft lr-find`: a learning rate for a recipe, from a short run with increasing rates."""

import argparse

from rich.table import Table

from weft.cli.configs import load_config
from weft.cli.tables import table_console
from weft.cli.train import split_arguments
from weft.trainer.learning_rate_finder import LearningRateSearch, find_learning_rate

_ROWS = 20
_BAR = 40


def run(arguments: argparse.Namespace) -> int:
    """Prints the loss per learning rate, and the rate at which it falls fastest."""
    recipe, overrides = split_arguments(arguments.recipe_and_overrides)
    search = find_learning_rate(
        load_config(recipe, overrides, allow=arguments.allow),
        min_rate=arguments.min,
        max_rate=arguments.max,
        num_steps=arguments.steps,
    )
    console = table_console()
    console.print(loss_table(search))
    console.print(
        f"The loss falls fastest at a learning rate of {search.suggestion:.2g}, a good first "
        f"peak value for {', '.join(search.fields)}."
    )
    return 0


def loss_table(search: LearningRateSearch) -> Table:
    """Returns a table of smoothed losses, with a bar for each sampled rate."""
    table = Table("rate", "loss", "", box=None)
    low, high = min(search.smoothed), max(search.smoothed)
    last = len(search.rates) - 1
    rows = sorted({round(i * last / (_ROWS - 1)) for i in range(_ROWS)})
    nearest = min(rows, key=lambda row: abs(row - search.rates.index(search.suggestion)))
    for row in rows:
        share = (search.smoothed[row] - low) / (high - low) if high > low else 0.0
        bar = "█" * max(1, round(_BAR * share))
        mark = " ← falls fastest" if row == nearest else ""
        table.add_row(f"{search.rates[row]:.2e}", f"{search.smoothed[row]:.4f}", bar + mark)
    return table
