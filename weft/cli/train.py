"""`weft train` and `weft launch`: training in one process, or in several through a scheduler."""

import argparse
import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

import weft
from weft import cli, config, errors, recipes
from weft.cli import configs, trained_models
from weft.distributed import cpu_threads
from weft.distributed.preemption import still_compiling
from weft.input import Baseline, ByteTokenizer, Corpus, ngram_baselines
from weft.launch import JobSetJob, LocalJob, SlurmJob, joined_processes
from weft.launch.job import STOPPED_EXIT_CODE, Job
from weft.report.display import Display, TextConsole, make_display, metric_texts
from weft.report.page import write_report
from weft.report.recorder import errors_logged
from weft.serialization.untrusted import printable
from weft.trainer import SpmdTrainer, compilation, has_ended, run_dir
from weft.trainer.run_lock import RunLock, move_aside, run_lock

_SAMPLE_TOKENS = 256
_SAMPLE_TEMPERATURE = 0.8


def run(arguments: argparse.Namespace) -> int:
    """Trains, or continues a run; as one of several processes if the environment defines them."""
    cli.continue_without_output()
    cpu_threads.provide_threads()
    with joined_processes() as place:
        if place is not None and arguments.fresh:
            raise errors.CommandLineError(
                "--fresh is for a run that you start yourself: a scheduler that restarts this "
                "process would move its own run aside. Move the directory away before, or choose "
                "another one with dir=runs/name."
            )
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
    cfg = configs.load_run(recipe, overrides, **arguments.trust)
    cfg = configs.on_mesh(cfg, selector=arguments.mesh_selector, mesh=arguments.mesh)
    made_by = configs.recipe_of_run(recipe, overrides, recipe=arguments.made_by)
    options = [word for option in chosen.items() if option[1] is not None for word in option]
    options += _options_for_texts(arguments)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compilation.compilation_cache(cfg.compilation_cache_dir))
        with _suggested_commands(arguments):
            if arguments.fresh:
                _move_aside(cfg.dir)
            stack.enter_context(run_lock(cfg.dir))
            run_dir.check_run_dir(cfg)
        named = recipes.named_trainer_configs().get(recipe)
        stopped: list[str] = []
        if named is not None and not named.prepare(cfg, functools.partial(_train_base, stopped)):
            return _stopped_code(stopped[0])
        return _conclude(*_run(recipe, cfg, made_by), [*options, recipe, *overrides])


def _options_for_texts(arguments: argparse.Namespace) -> list[str]:
    options = [word for name in arguments.allow for word in ("--allow", name)]
    return options + (["--recipe", arguments.made_by] if arguments.made_by else [])


@contextlib.contextmanager
def _suggested_commands(arguments: argparse.Namespace) -> Iterator[None]:
    """Adds commands that work to an error about the directory of the run."""
    try:
        yield
    except errors.RunDirError as error:
        if error.free_dir is None:
            raise
        words = [w for w in arguments.words if w.partition("=")[0].strip() != "dir"]
        commands = {"": [*words, f"dir={error.free_dir}"]}
        if not isinstance(error, errors.RunDirInUseError) and not arguments.fresh:
            where = 2 if words[0] == "launch" else 1
            fresh = [*arguments.words[:where], "--fresh", *arguments.words[where:]]
            commands["or, to move the old run aside and start again:"] = fresh
        lines = [f"{text}\n  {program('weft')} {shlex.join(c)}" for text, c in commands.items()]
        raise type(error)("\n".join([str(error), *lines]), free_dir=error.free_dir) from error


def _move_aside(directory: str) -> None:
    target = move_aside(directory)
    if target is not None:
        print(printable(f"moved the earlier run from {directory} to {target}"))


def _train_base(stopped: list[str], recipe: str, cfg: SpmdTrainer.Config) -> SpmdTrainer | None:
    """Trains what a run starts from; returns the trainer, or None if it was stopped by a signal."""
    run_dir.check_run_dir(cfg)
    trainer, display, baselines = _run(recipe, cfg)
    assert display.ended is not None
    if not has_ended(display.ended[1]):
        stopped.append(display.ended[1])
        return None
    _compare_with_baselines(display, baselines)
    display.print_line("")
    return trainer


def _run(
    recipe: str, cfg: SpmdTrainer.Config, made_by: Mapping[str, Any] | None = None
) -> tuple[SpmdTrainer, Display, Mapping[str, Baseline]]:
    trainer = cfg.instantiate(parent=None)
    # Only one process prints.
    console = TextConsole(highlight=False, quiet=jax.process_index() != 0)
    display = make_display(console, cfg.dir)
    display.print_line(f"weft {weft.__version__}, jax {jax.__version__}: training {recipe}")
    baselines = _print_corpus(cfg, display)
    trainer.run(return_evaler_summaries=True, progress=display, recipe=made_by)
    return trainer, display, baselines


def split_arguments(words: Sequence[str]) -> tuple[str, list[str]]:
    """Splits the arguments of `weft train` into a recipe, by default the first, and overrides.

    Raises CommandLineError for two names.
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if len(names) > 1:
        raise errors.CommandLineError(
            f"{names[1]!r} is neither the only recipe nor of the form path=value. Write it as "
            f"weft train {names[0]} path.to.field=value."
        )
    return names[0] if names else recipes.RECIPES[0].name, overrides


# Output before training.


def _print_corpus(cfg: SpmdTrainer.Config, display: Display) -> Mapping[str, Baseline]:
    """Prints the corpus, and the losses of count-based models on its held-out part."""
    baselines: Mapping[str, Baseline] = {}
    for corpus_cfg in run_dir.find_fields("corpus", cfg.input).values():
        corpus = config.maybe_instantiate(corpus_cfg)
        if not isinstance(corpus, Corpus):
            continue
        record = corpus.record()
        display.print_line(
            f"corpus     {record['name']}: {record['files']:,} files, "
            f"{record['train_bytes']:,} bytes to train on, {record['held_out_bytes']:,} held out"
        )
        if isinstance(trained_models.find_tokenizer(cfg), ByteTokenizer):
            baselines = ngram_baselines(corpus)
            for name, baseline in baselines.items():
                values = {"loss": baseline.nats_per_token, "bits_per_byte": baseline.bits_per_byte}
                display.print_line(f"{name:9}  {', '.join(metric_texts(values))}")
    return baselines


# Output after training.


def _conclude(
    trainer: SpmdTrainer,
    display: Display,
    baselines: Mapping[str, Baseline],
    arguments: Sequence[str],
) -> int:
    cfg = trainer.config
    assert display.ended is not None
    step, reason = display.ended
    facts: dict[str, Any] = {
        "baselines": {
            name: {"nats_per_token": b.nats_per_token, "bits_per_byte": b.bits_per_byte}
            for name, b in baselines.items()
        }
    }
    stopped = not has_ended(reason)
    if not stopped:
        _compare_with_baselines(display, baselines)
        with errors_logged("no text of the model can be shown"):
            facts["samples"] = _sample(trainer, display, step)
    if jax.process_index() == 0:
        with errors_logged("the record of the run cannot be written"):
            run_dir.update_record(cfg.dir, **facts)
        with errors_logged("the report of the run cannot be written"):
            write_report(cfg.dir)
    commands = _next_commands(cfg, arguments, stopped=stopped, is_saved=display.is_saved)
    display.print_line("\n" + "\n".join(commands))
    return _stopped_code(reason) if stopped else 0


def _stopped_code(signal_name: str) -> int:
    """Returns the exit code after a signal, as in a shell unless the environment has another."""
    return int(os.environ.get(STOPPED_EXIT_CODE, 128 + signal.Signals[signal_name]))


def _compare_with_baselines(display: Display, baselines: Mapping[str, Baseline]) -> None:
    if display.evals:
        display.print_line("")
    for name, (step, values) in display.evals.items():
        line = f"{name} at step {step:,}: {', '.join(metric_texts(values))}"
        loss = values.get("loss")
        if loss is not None and baselines:
            losses = {name: b.nats_per_token for name, b in baselines.items()}
            beaten = [f"{name} ({of:.3f})" for name, of in losses.items() if loss < of]
            line += f"\n  below {', '.join(beaten)}" if beaten else "\n  above all baselines"
        display.print_line(line)


def _sample(trainer: SpmdTrainer, display: Display, step: int) -> list[dict[str, Any]]:
    """Prints generated text, if the model can_generate any, with the texts of earlier runs."""
    tokenizer = trained_models.find_tokenizer(trainer.config)
    if tokenizer is None or not trained_models.can_generate(trainer.model):
        return []
    with trainer.mesh():
        text = trained_models.generate(
            trainer.model,
            trainer.model_params_for_eval(),
            tokenizer=tokenizer,
            prompt="",
            num_tokens=_SAMPLE_TOKENS,
            temperature=_SAMPLE_TEMPERATURE,
            seed=trainer.config.seed,
        )
    display.print_line(f"\nUnprompted text from the model:\n\n{text}")
    earlier = run_dir.read_record(trainer.config.dir).get("samples", [])
    sample = {"step": step, "prompt": "", "text": text}
    return [*(s for s in earlier if s["step"] != step), sample]


def _next_commands(
    cfg: SpmdTrainer.Config, arguments: Sequence[str], *, stopped: bool, is_saved: bool
) -> list[str]:
    weft_command = program("weft")
    continued = list(arguments)
    if not stopped:
        continued = [a for a in arguments if not a.startswith("max_step=")]
        continued.append(f"max_step={2 * cfg.max_step}")
    commands = [
        f"{program('tensorboard')} --logdir {shlex.quote(cfg.dir)}",
        f"{weft_command} train {shlex.join(continued)}",
    ]
    if is_saved and trained_models.find_tokenizer(cfg) is not None:
        commands.append(f"{weft_command} sample {shlex.quote(cfg.dir)} --prompt 'def '")
    return commands


def program(name: str) -> str:
    """Returns the command for a program installed with this one: its name if it is on the PATH."""
    sibling, found = os.path.join(os.path.dirname(sys.argv[0]), name), shutil.which(name)
    if not os.path.isfile(sibling) or (found and os.path.samefile(found, sibling)):
        return name
    return shlex.quote(os.path.relpath(sibling))


JOBS: dict[str, type[Job]] = {"local": LocalJob, "slurm": SlurmJob, "k8s": JobSetJob}


def launch(arguments: argparse.Namespace) -> int:
    """Runs the processes, or prints the input of a scheduler."""
    job = make_job(arguments)
    if isinstance(job, LocalJob):
        cli.continue_without_output()
        return job.run()
    if isinstance(job, SlurmJob) and arguments.submit:
        print(job.submit())
    elif isinstance(job, SlurmJob):
        print(job.script(), end="")
    elif isinstance(job, JobSetJob):
        print(job.yaml(), end="")
        if job.config.volume_claim is None and job.config.num_processes > 1:
            print(
                "weft launch: these pods share no directory, but a run needs one. Name a "
                "claim that all of them can write to: --job volume_claim=NAME",
                file=sys.stderr,
            )
    return 0


def make_job(arguments: argparse.Namespace) -> Job:
    """Creates the job that the arguments of `weft launch` describe.

    Validates the recipe, its fields and the directory of a local run before anything is started,
    except for weights that may exist only on the pods' volume.

    Raises WeftError for invalid arguments.
    """
    recipe, overrides = split_arguments(arguments.recipe_and_overrides)
    run_cfg = None
    try:
        run_cfg = configs.load_run(recipe, overrides, **arguments.trust)
    except errors.WeightsReadError as error:
        if arguments.where != "k8s":
            raise
        print(
            f"weft launch: not checked, because it is not on this machine: {error}", file=sys.stderr
        )
    here = arguments.where == "local"
    # Without -P, `python -m` would import from the current directory first.
    program = [sys.executable, "-P", "-m", "weft"] if here else ["weft"]
    cfg = JOBS[arguments.where].default_config()
    cfg.set(
        name=job_name(recipe),
        command=[*program, "train", *_options_for_texts(arguments), recipe, *overrides],
        num_processes=arguments.num_processes,
    )
    job = config.apply_overrides(cfg, arguments.job, source="--job").instantiate()
    if here and run_cfg is not None:
        with _suggested_commands(arguments):
            if arguments.fresh:
                _move_aside(run_cfg.dir)
            with RunLock(run_cfg.dir):
                run_dir.check_run_dir(run_cfg)
    return job


def job_name(recipe: str) -> str:
    """Returns a job name for a recipe that is valid for every scheduler.

    >>> job_name("lm-tiny"), job_name("configs/Wide_1.txt"), job_name("models/my.py:wide")
    ('lm-tiny', 'wide-1', 'my-wide')
    """
    path, _, function = recipe.partition(":")
    stem = os.path.splitext(os.path.basename(os.path.normpath(path)))[0]
    return re.sub(r"[^a-z0-9]+", "-", f"{stem}-{function}".lower()).strip("-") or "weft"
