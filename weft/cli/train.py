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
from typing import Any, NamedTuple

import jax

import weft
from weft import cli, config, errors, recipes
from weft.cli import configs, sample, trained_models
from weft.distributed import cpu_threads
from weft.distributed.preemption import still_compiling
from weft.generation.decoding_models import can_generate
from weft.input import Baseline, ByteTokenizer, Corpus, ngram_baselines
from weft.launch import JobSetJob, LocalJob, SlurmJob, joined_processes
from weft.launch.job import STOPPED_EXIT_CODE, Job
from weft.report.display import Display, TextConsole, make_display, metric_texts
from weft.report.page import write_report
from weft.report.recorder import errors_logged
from weft.serialization.untrusted import printable
from weft.trainer import SpmdTrainer, compilation, has_ended, run_dir
from weft.trainer.checkpointer.stores import check_unused
from weft.trainer.frozen_base import keep_builder_of_run
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
    cfg = configs.load_run(recipe, overrides, **arguments.trust)
    cfg = configs.on_mesh(
        cfg, selector=arguments.mesh_selector, mesh=arguments.mesh
    )
    recipe_record = configs.recipe_of_run(
        recipe, overrides, recipe=arguments.made_by
    )
    options = _mesh_options(arguments) + options_for_texts(arguments)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            compilation.compilation_cache(cfg.compilation_cache_dir)
        )
        with _suggested_commands(arguments):
            if arguments.fresh and arguments.resume:
                raise errors.CommandLineError(
                    "--fresh starts a run again, and --resume continues it; write one of the two."
                )
            if arguments.fresh:
                _move_aside(cfg)
            stack.enter_context(run_lock(cfg.dir))
            keep_builder_of_run(cfg)
            run_dir.check_run_dir(cfg, resume=arguments.resume)
        named_recipe = recipes.named_trainer_configs().get(recipe)
        if named_recipe is not None:
            signal_names: list[str] = []
            if not named_recipe.prepare(
                cfg, functools.partial(_train_base, signal_names)
            ):
                return _stopped_code(signal_names[0])
        training = _run(recipe, cfg, recipe_record, resume=arguments.resume)
        return _conclude(training, [*options, recipe, *overrides])


def _mesh_options(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of a command that say for which hardware and mesh it is."""
    options: list[str] = []
    if arguments.mesh_selector is not None:
        options += ["--mesh-selector", arguments.mesh_selector]
    if arguments.mesh is not None:
        options += ["--mesh", arguments.mesh]
    return options


def options_for_texts(arguments: argparse.Namespace) -> list[str]:
    """Returns the options of a command that say what the texts of configs may name."""
    options: list[str] = []
    for name in arguments.allow:
        options += ["--allow", name]
    if arguments.made_by:
        options += ["--recipe", arguments.made_by]
    return options


@contextlib.contextmanager
def _suggested_commands(arguments: argparse.Namespace) -> Iterator[None]:
    """Adds commands that work to an error about the directory of the run."""
    try:
        yield
    except errors.RunDirError as error:
        if error.free_dir is None:
            raise
        words: list[str] = arguments.words
        elsewhere = [
            word for word in words if word.partition("=")[0].strip() != "dir"
        ]
        elsewhere.append(f"dir={error.free_dir}")
        lines = [str(error), "", f"  {program('weft')} {shlex.join(elsewhere)}"]
        if (
            not isinstance(error, errors.RunDirInUseError)
            and not arguments.fresh
        ):
            num_command_words = 2 if words[0] == "launch" else 1
            fresh = [
                *words[:num_command_words],
                "--fresh",
                *words[num_command_words:],
            ]
            lines.append("or, to move the old run aside and start again:")
            lines.append(f"  {program('weft')} {shlex.join(fresh)}")
        raise type(error)("\n".join(lines), free_dir=error.free_dir) from error


def _move_aside(cfg: SpmdTrainer.Config) -> None:
    store = getattr(cfg.checkpointer, "copy_to", None)
    if store is not None:
        check_unused(store, cfg.dir)
    target = move_aside(cfg.dir)
    if target is not None:
        print(printable(f"moved the earlier run from {cfg.dir} to {target}"))


class _Training(NamedTuple):
    """Training that has ended.

    Attributes:
        reason: Why it ended, see `Hook.on_end`; `step` is its last.
        baselines: Losses of count-based models on the held-out part of the corpus, by name.
    """

    trainer: SpmdTrainer
    display: Display
    step: int
    reason: str
    baselines: Mapping[str, Baseline]


def _train_base(
    signal_names: list[str], recipe: str, cfg: SpmdTrainer.Config
) -> SpmdTrainer | None:
    """Trains what a run starts from.

    Returns the trainer; None if a signal has stopped it, whose name is added to `signal_names`.
    """
    run_dir.check_run_dir(cfg)
    training = _run(recipe, cfg)
    if not has_ended(training.reason):
        signal_names.append(training.reason)
        return None
    _compare_with_baselines(training.display, training.baselines)
    training.display.print_line("")
    return training.trainer


def _run(
    recipe: str,
    cfg: SpmdTrainer.Config,
    recipe_record: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
) -> _Training:
    trainer = cfg.instantiate(parent=None)
    # Only one process prints.
    console = TextConsole(highlight=False, quiet=jax.process_index() != 0)
    display = make_display(console, cfg.dir)
    display.print_line(
        f"weft {weft.__version__}, jax {jax.__version__}: training {recipe}"
    )
    baselines = _print_corpus(cfg, display)
    trainer.run(
        return_evaler_summaries=True,
        progress=display,
        recipe=recipe_record,
        resume=resume,
    )
    assert display.ended is not None
    step, reason = display.ended
    return _Training(trainer, display, step, reason, baselines)


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


def _print_corpus(
    cfg: SpmdTrainer.Config, display: Display
) -> Mapping[str, Baseline]:
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
                values = {
                    "loss": baseline.nats_per_token,
                    "bits_per_byte": baseline.bits_per_byte,
                }
                display.print_line(
                    f"{name:9}  {', '.join(metric_texts(values))}"
                )
    return baselines


# Output after training.


def _conclude(training: _Training, arguments: Sequence[str]) -> int:
    """Writes the report, and prints samples and commands to continue with; returns the exit code.

    `arguments` are those of `weft train` for this run.
    """
    cfg, display = training.trainer.config, training.display
    losses_of_baselines: dict[str, dict[str, float]] = {}
    for name, baseline in training.baselines.items():
        losses_of_baselines[name] = {
            "nats_per_token": baseline.nats_per_token,
            "bits_per_byte": baseline.bits_per_byte,
        }
    facts: dict[str, Any] = {"baselines": losses_of_baselines}
    is_complete = has_ended(training.reason)
    if is_complete:
        _compare_with_baselines(display, training.baselines)
        # A model of conversations answers prompts, and continues nothing.
        if not _has_chat_template(cfg):
            with errors_logged("no text of the model can be shown"):
                facts["samples"] = _sample(training)
    if jax.process_index() == 0:
        with errors_logged("the record of the run cannot be written"):
            run_dir.update_record(cfg.dir, **facts)
        with errors_logged("the report of the run cannot be written"):
            write_report(cfg.dir)
    commands = _next_commands(
        cfg, arguments, is_complete=is_complete, is_saved=display.is_saved
    )
    display.print_line("")
    for words in commands:
        display.print_command(words)
    return 0 if is_complete else _stopped_code(training.reason)


def _stopped_code(signal_name: str) -> int:
    """Returns the exit code after a signal, as in a shell unless the environment has another."""
    return int(
        os.environ.get(STOPPED_EXIT_CODE, 128 + signal.Signals[signal_name])
    )


def _compare_with_baselines(
    display: Display, baselines: Mapping[str, Baseline]
) -> None:
    if display.evals:
        display.print_line("")
    for name, (step, values) in display.evals.items():
        line = f"{name} at step {step:,}: {', '.join(metric_texts(values))}"
        loss = values.get("loss")
        if loss is not None and baselines:
            beaten: list[str] = []
            for baseline_name, baseline in baselines.items():
                if loss < baseline.nats_per_token:
                    beaten.append(
                        f"{baseline_name} ({baseline.nats_per_token:.3f})"
                    )
            line += (
                f"\n  below {', '.join(beaten)}"
                if beaten
                else "\n  above all baselines"
            )
        display.print_line(line)


def _sample(training: _Training) -> list[dict[str, Any]]:
    """Prints generated text, if the model can generate any.

    Returns it with the texts of earlier steps, to be recorded.
    """
    trainer, step = training.trainer, training.step
    tokenizer = trained_models.find_tokenizer(trainer.config)
    if tokenizer is None or not can_generate(trainer.model):
        return []
    with trainer.mesh():
        text = sample.generate_text(
            trainer.model,
            trainer.model_params_for_eval(),
            tokenizer=tokenizer,
            tokens=_SAMPLE_TOKENS,
            temperature=_SAMPLE_TEMPERATURE,
            seed=trainer.config.seed,
        )
    training.display.print_line(f"\nUnprompted text from the model:\n\n{text}")
    recorded_samples = run_dir.read_record(trainer.config.dir).get(
        "samples", []
    )
    # Those with a prompt are of the run's own evaluations.
    samples = [
        each
        for each in recorded_samples
        if each["step"] != step or each["prompt"]
    ]
    return [*samples, {"step": step, "prompt": "", "text": text}]


def _next_commands(
    cfg: SpmdTrainer.Config,
    arguments: Sequence[str],
    *,
    is_complete: bool,
    is_saved: bool,
) -> list[list[str]]:
    """Returns the commands that a person wants next, as quoted words."""
    weft_command = program("weft")
    directory = shlex.quote(cfg.dir)
    next_arguments = list(arguments)
    if is_complete:
        next_arguments = [
            word for word in arguments if not word.startswith("max_step=")
        ]
        next_arguments.append(f"max_step={2 * cfg.max_step}")
    commands = [
        [program("tensorboard"), "--logdir", directory],
        [weft_command, "train", *map(shlex.quote, next_arguments)],
    ]
    if not is_saved or trained_models.find_tokenizer(cfg) is None:
        return commands
    if _has_chat_template(cfg):
        commands.append([weft_command, "chat", directory])
    else:
        commands.append([weft_command, "sample", directory, "--prompt 'def '"])
    return commands


def _has_chat_template(cfg: SpmdTrainer.Config) -> bool:
    """Returns whether a run's input writes conversations."""
    templates = run_dir.find_fields("template", cfg.input).values()
    return any(template is not None for template in templates)


def program(name: str) -> str:
    """Returns the command for a program installed with this one: its name if it is on the PATH."""
    sibling = os.path.join(os.path.dirname(sys.argv[0]), name)
    if not os.path.isfile(sibling):
        return name
    path_program = shutil.which(name)
    if path_program and os.path.samefile(path_program, sibling):
        return name
    return shlex.quote(os.path.relpath(sibling))


# Without -P, `python -m` would import from the current directory first.
THIS_WEFT = [sys.executable, "-P", "-m", "weft"]

JOBS: dict[str, type[Job]] = {
    "local": LocalJob,
    "slurm": SlurmJob,
    "k8s": JobSetJob,
}


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
        run_cfg = configs.on_mesh(
            configs.load_run(recipe, overrides, **arguments.trust),
            selector=arguments.mesh_selector,
            mesh=arguments.mesh,
        )
    except errors.WeightsReadError as error:
        if arguments.where != "k8s":
            raise
        print(
            f"weft launch: not checked, because it is not on this machine: {error}",
            file=sys.stderr,
        )
    is_local = arguments.where == "local"
    program = THIS_WEFT if is_local else ["weft"]
    cfg = JOBS[arguments.where].default_config()
    cfg.set(
        name=job_name(recipe),
        command=[
            *program,
            "train",
            *_mesh_options(arguments),
            *options_for_texts(arguments),
            recipe,
            *overrides,
        ],
    )
    if isinstance(cfg, LocalJob.Config):
        cfg.min_processes, cfg.num_processes = arguments.num_processes
    else:
        cfg.num_processes = arguments.num_processes
    job = config.apply_overrides(
        cfg, arguments.job, source="--job"
    ).instantiate()
    if is_local and run_cfg is not None:
        with _suggested_commands(arguments):
            if arguments.fresh:
                _move_aside(run_cfg)
            with RunLock(run_cfg.dir):
                run_dir.check_run_dir(run_cfg)
    return job


def job_name(recipe: str) -> str:
    """Returns a job name for a recipe that is valid for every scheduler.

    >>> job_name("lm-tiny"), job_name("configs/Wide_1.txt"), job_name("models/my.py:wide")
    ('lm-tiny', 'wide-1', 'my-wide')
    """
    path, _, function = recipe.partition(":")
    file_name = os.path.basename(os.path.normpath(path))
    stem, _ = os.path.splitext(file_name)
    name = re.sub(r"[^a-z0-9]+", "-", f"{stem}-{function}".lower())
    return name.strip("-") or "weft"
