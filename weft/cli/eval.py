"""`weft eval` measures a language model on a file of texts, questions or tasks.

The model is that of a run, or of a Hugging Face folder. The result is printed as a table; of a run,
it is kept in its directory and shown in its report.
"""

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from weft import errors
from weft.cli.sample import model_of_arguments
from weft.evaluation import EvaluationResult, evaluate
from weft.recipes import find_recipe
from weft.report import display, write_report
from weft.report.results import add_evaluation
from weft.trainer import run_dir
from weft.trainer.compilation import compilation_cache

_SETTINGS = (
    *("task", "shots", "examples", "chat", "length", "stride"),
    *("tokens", "k", "n", "temperature", "seed", "limit"),
)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates a model, and prints the metrics."""
    settings: dict[str, Any] = {}
    for name in _SETTINGS:
        value = getattr(arguments, name)
        if value is not None:
            settings[name] = value
    if arguments.stop:
        settings["stop"] = arguments.stop
    if arguments.checker is not None:
        settings["checker"] = find_recipe(arguments.checker).load_function()
    with compilation_cache(None):
        model = model_of_arguments(arguments)
        result = evaluate(model, arguments.data, **settings)
    _print_result(result)
    if arguments.json is not None:
        _write_json(arguments.json, result)
    if run_dir.was_started(arguments.dir):
        evaluation = result.as_json()
        del evaluation["examples"]
        evaluation["data"] = os.path.basename(arguments.data)
        evaluation["settings"] = _settings_text(arguments, settings)
        add_evaluation(arguments.dir, evaluation)
        write_report(arguments.dir)
    return 0


def _settings_text(
    arguments: argparse.Namespace, settings: Mapping[str, Any]
) -> str:
    """Returns the settings that were chosen, as one line of text."""
    parts: list[str] = []
    if arguments.step is not None:
        parts.append(f"step={arguments.step}")
    for name, value in settings.items():
        if name == "checker":
            value = arguments.checker
        if value not in (0, False):
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def _print_result(result: EvaluationResult) -> None:
    columns = ["value", "standard error", "examples"]
    table = display.tree_table(result.task, columns, numbers=columns)
    for name, value in result.metrics.items():
        error = result.standard_errors.get(name)
        table.add_row(
            name,
            display.metric_text(value),
            "" if error is None else f"± {display.metric_text(error)}",
            f"{result.num_examples:,}",
        )
    display.print_table(display.table_console(), table)


def _write_json(path: str, result: EvaluationResult) -> None:
    text = json.dumps(result.as_json(), indent=2, ensure_ascii=False)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise errors.CommandLineError(
            f"--json {path!r} cannot be written: {error.strerror}."
        ) from error
