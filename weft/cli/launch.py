"""`weft launch`: trains a recipe with several processes, here or through a scheduler."""

import argparse
import os
import re
import sys
from typing import Any

from weft.cli.configs import load_run
from weft.cli.output import go_on_without_output
from weft.cli.train import split_arguments
from weft.config import apply_overrides
from weft.errors import WeightsReadError
from weft.launch.job import Job
from weft.launch.jobset import JobSetJob
from weft.launch.local import LocalJob
from weft.launch.slurm import SlurmJob

JOBS: dict[str, type[Job]] = {"local": LocalJob, "slurm": SlurmJob, "k8s": JobSetJob}


def run(arguments: argparse.Namespace) -> int:
    """Runs the processes, or prints the input of a scheduler."""
    job = make_job(arguments)
    if isinstance(job, LocalJob):
        go_on_without_output()
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


def make_job(arguments: argparse.Namespace) -> Any:
    """Creates the job that the arguments of `weft launch` describe.

    Validates the recipe and its fields before anything is started, except for weights that may
    exist only on the pods' volume.

    Raises:
        WeftError: for invalid arguments.
    """
    recipe, overrides = split_arguments(arguments.recipe_and_overrides)
    try:
        load_run(recipe, overrides, allow=arguments.allow)
    except WeightsReadError as error:
        if arguments.where != "k8s":
            raise
        print(
            f"weft launch: not checked, because it is not on this machine: {error}", file=sys.stderr
        )
    here = arguments.where == "local"
    program = [sys.executable, "-m", "weft"] if here else ["weft"]
    options = [word for name in arguments.allow for word in ("--allow", name)]
    cfg = JOBS[arguments.where].default_config()
    cfg.set(
        name=job_name(recipe),
        command=[*program, "train", *options, recipe, *overrides],
        num_processes=arguments.num_processes,
    )
    return apply_overrides(cfg, arguments.job, source="--job").instantiate()


def job_name(recipe: str) -> str:
    """Returns a job name for a recipe that is valid for every scheduler.

    >>> job_name("lm-tiny"), job_name("configs/Wide_1.txt")
    ('lm-tiny', 'wide-1')
    """
    stem = os.path.splitext(os.path.basename(os.path.normpath(recipe)))[0]
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "weft"
