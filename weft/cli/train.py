"""`weft train`: trains a recipe and reports the results."""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

import weft
from weft.cli.configs import load_run
from weft.cli.display import Display, loss_text, make_display
from weft.cli.generate import find_tokenizer, generate, generates
from weft.cli.meshes import on_mesh
from weft.cli.output import go_on_without_output
from weft.config import maybe_instantiate
from weft.errors import CommandLineError
from weft.input import Baseline, ByteTokenizer, Corpus, ngram_baselines
from weft.launch.distributed import joined_processes
from weft.launch.job import STOPPED_EXIT_CODE
from weft.recipes import RECIPES, named_trainer_configs
from weft.trainer.interruption import still_compiling
from weft.trainer.progress import has_ended
from weft.trainer.report import write_report
from weft.trainer.run_record import check_run_dir, read_record, update_record, values_named

_SAMPLE_TOKENS = 256
_SAMPLE_TEMPERATURE = 0.8


def run(arguments: argparse.Namespace) -> int:
    """Trains, or continues a run; as one of several processes if the environment defines them."""
    go_on_without_output()
    with joined_processes():
        code = _train(arguments)
    if still_compiling():  # asked to stop; the compiler would block for minutes
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _train(arguments: argparse.Namespace) -> int:
    recipe, overrides = split_arguments(arguments.recipe_and_overrides)
    chosen = {"--mesh-selector": arguments.mesh_selector, "--mesh": arguments.mesh}
    cfg = on_mesh(
        load_run(recipe, overrides, allow=arguments.allow),
        selector=arguments.mesh_selector,
        mesh=arguments.mesh,
    )
    check_run_dir(cfg)
    named = named_trainer_configs().get(recipe)
    if named is not None and not named.prepare(cfg, _train_before):
        return _stopped_code()
    options = [word for option in chosen.items() if option[1] is not None for word in option]
    options += [word for name in arguments.allow for word in ("--allow", name)]
    return _conclude(*_run(recipe, cfg), [*options, recipe, *overrides])


def _train_before(recipe: str, cfg: Any) -> Any | None:
    """Trains what a run starts from; returns the trainer, or None if it was asked to stop."""
    check_run_dir(cfg)
    trainer, display, baselines = _run(recipe, cfg)
    assert display.ended is not None
    if not has_ended(display.ended[1]):
        display.say_stopped()
        return None
    _judge(display, baselines)
    display.say("")
    return trainer


def _run(recipe: str, cfg: Any) -> tuple[Any, Display, Mapping[str, Baseline]]:
    """Trains a config, and displays its progress."""
    trainer = cfg.instantiate(parent=None)
    # Only one process prints.
    console = Console(highlight=False, quiet=jax.process_index() != 0)
    with make_display(console, cfg.dir) as display:
        display.say(f"weft {weft.__version__}, jax {jax.__version__}: training {recipe}")
        baselines = _introduce_corpus(cfg, display)
        trainer.run(return_evaler_summaries=True, listener=display)
    return trainer, display, baselines


def split_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """Splits the arguments of `weft train` into a recipe, by default the first, and overrides.

    Raises:
        CommandLineError: for two names.

    >>> split_arguments(["lm", "max_step=10"]), split_arguments(["seed=1"])
    (('lm', ['max_step=10']), ('lm', ['seed=1']))
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(names) > 1:
        raise CommandLineError(
            f"{names[1]!r} is neither the only recipe nor of the form path=value. Write it as "
            f"weft train {names[0]} path.to.field=value."
        )
    return names[0] if names else RECIPES[0].name, overrides


# Output before training.


def _introduce_corpus(cfg: Any, display: Display) -> Mapping[str, Baseline]:
    """Prints the corpus, and the losses of count-based models on its held-out part."""
    baselines: Mapping[str, Baseline] = {}
    for corpus_cfg in values_named("corpus", cfg.input).values():
        corpus = maybe_instantiate(corpus_cfg)
        if not isinstance(corpus, Corpus):
            continue
        record = corpus.record()
        display.say(
            f"corpus     {record['name']}: {record['files']:,} files, "
            f"{record['train_bytes']:,} bytes to train on, {record['held_out_bytes']:,} held out, "
            f"SHA-256 {str(record['sha256'])[:12]}"
        )
        if isinstance(find_tokenizer(cfg), ByteTokenizer):
            baselines = ngram_baselines(corpus)
            for name, baseline in baselines.items():
                display.say(f"{name:9}  {_baseline_text(baseline)}")
    return baselines


def _baseline_text(baseline: Baseline) -> str:
    return loss_text({"loss": baseline.nats_per_token, "bits_per_byte": baseline.bits_per_byte})


# Output after training.


def _conclude(
    trainer: Any, display: Display, baselines: Mapping[str, Baseline], arguments: Sequence[str]
) -> int:
    """Prints the results; returns the exit code."""
    cfg = trainer.config
    assert display.ended is not None
    step, reason = display.ended
    facts: dict[str, Any] = {
        "end": {"step": step, "reason": reason},
        "model": {"parameters": display.parameters},
        "baselines": {
            name: {"nats_per_token": b.nats_per_token, "bits_per_byte": b.bits_per_byte}
            for name, b in baselines.items()
        },
    }
    stopped = not has_ended(reason)
    if stopped:
        display.say_stopped()
    else:
        _judge(display, baselines)
        facts["samples"] = _sample(trainer, display, step)
    if jax.process_index() == 0:
        update_record(cfg.dir, **facts)
        display.say(f"\nreport     {write_report(cfg.dir)}")
    commands = _next_commands(cfg, arguments, stopped=stopped, is_saved=display.is_saved)
    display.say("\n" + "\n".join(commands))
    return _stopped_code() if stopped else 0


def _stopped_code() -> int:
    return int(os.environ.get(STOPPED_EXIT_CODE, 0))


def _judge(display: Display, baselines: Mapping[str, Baseline]) -> None:
    """Compares the evaluations with the baselines."""
    if display.evals:
        display.say("")
    for name, (step, values) in display.evals.items():
        line = f"{name} at step {step:,}: {loss_text(values)}"
        loss = values.get("loss")
        if loss is not None and baselines:
            beaten = [
                f"{n} ({b.nats_per_token:.3f})"
                for n, b in baselines.items()
                if loss < b.nats_per_token
            ]
            line += f"; below {', '.join(beaten)}" if beaten else "; above all baselines"
        display.say(line)


def _sample(trainer: Any, display: Display, step: int) -> list[dict[str, Any]]:
    """Prints generated text, if the model generates any, with the texts of earlier runs."""
    tokenizer = find_tokenizer(trainer.config)
    if tokenizer is None or not generates(trainer.model):
        return []
    with trainer.mesh():
        text = generate(
            trainer.model,
            trainer.model_params_for_eval(),
            tokenizer=tokenizer,
            prompt="",
            num_tokens=_SAMPLE_TOKENS,
            temperature=_SAMPLE_TEMPERATURE,
            seed=trainer.config.seed,
        )
    display.say(f"\nUnprompted text from the model:\n\n{text}")
    earlier = read_record(trainer.config.dir).get("samples", [])
    sample = {"step": step, "prompt": "", "text": text}
    return [*(s for s in earlier if s["step"] != step), sample]


def _next_commands(
    cfg: Any, arguments: Sequence[str], *, stopped: bool, is_saved: bool
) -> list[str]:
    """Returns commands for the next steps, ready to be copied."""
    weft_command = program("weft")
    go_on = arguments if stopped else _with(arguments, f"max_step={2 * cfg.max_step}")
    commands = [
        f"{program('tensorboard')} --logdir {shlex.quote(cfg.dir)}",
        f"{weft_command} train {shlex.join(go_on)}",
    ]
    if is_saved and find_tokenizer(cfg) is not None:
        commands.append(f"{weft_command} sample {shlex.quote(cfg.dir)} --prompt 'def '")
    return commands


def _with(arguments: Sequence[str], override: str) -> list[str]:
    name = override.partition("=")[0]
    return [*(a for a in arguments if not a.startswith(f"{name}=")), override]


def program(name: str) -> str:
    """Returns the command for a program installed with this one: its name if it is on the PATH."""
    beside, found = os.path.join(os.path.dirname(sys.argv[0]), name), shutil.which(name)
    if not os.path.isfile(beside) or (found and os.path.samefile(found, beside)):
        return name
    return shlex.quote(os.path.relpath(beside))
