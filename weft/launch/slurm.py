"""`SlurmJob`: a script for `sbatch` that starts the processes with `srun`.

When one process has ended, those that remain are killed after `grace_seconds` (`--wait`). Processes
get a SIGTERM in time to save before the time limit; with `max_tries`, the job is then requeued and
continues, but not after a SIGINT, by which a person stops it.
"""

import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from weft.errors import JobConfigError, MissingExtraError
from weft.launch import job

# Drawn when the job starts, so that it is not stored in a file; srun passes it to the processes.
_TOKEN_LINE = f'export {job.RENDEZVOUS_TOKEN}="$(od -An -N16 -tx1 /dev/urandom | tr -d " \\n")"'
_INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}"


class SlurmJob(job.Job):
    """Processes on the nodes of a Slurm cluster.

    >>> cfg = SlurmJob.default_config().set(name="lm", command=["weft", "train", "lm"])
    >>> print(cfg.set(num_processes=2, time="8:00:00").instantiate().script().splitlines()[1])
    #SBATCH --job-name=lm
    """

    class Config(job.Job.Config):
        """Configures a SlurmJob."""

        nodes: int | None = None
        """Number of nodes; None for one process per node."""
        time: str | None = None
        """Time limit in Slurm's format: 90 (minutes), 8:00:00, 2-12:00:00."""
        partition: str | None = None
        account: str | None = None
        cpus_per_process: int | None = None
        memory_per_node: str | None = None
        output: str = "%x-%j.log"
        """Output file, with Slurm's patterns: %x for the name, %j for the job's number."""
        sbatch: dict[str, str] = {}
        """Further options of sbatch by name, such as {"qos": "high", "exclusive": ""}."""
        setup: Sequence[str] = []
        """Shell commands to run before the processes start, such as "module load cuda"."""

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        nodes = self._nodes()
        if nodes < 1 or cfg.num_processes % nodes:
            raise JobConfigError(
                f"{self._where('nodes')}={cfg.nodes} does not divide "
                f"num_processes={cfg.num_processes}; all nodes run the same number."
            )
        where = f"SlurmJob {cfg.name!r}"
        one_word = "one word, since a directive of sbatch ends at a space"
        for field in (
            "name",
            "partition",
            "account",
            "output",
            "memory_per_node",
        ):
            job.check_text(
                where, field, getattr(cfg, field), r"[^\s'\"\\]+", one_word
            )
        for name, value in cfg.sbatch.items():
            job.check_text(
                where,
                "sbatch",
                name,
                r"[a-z][a-z0-9-]*",
                "names, as in --name=value",
            )
            job.check_text(
                where, f"sbatch[{name!r}]", value, r"[^\s'\"\\]*", one_word
            )
        expected = "Slurm's time format: 90 (minutes), 8:00:00 or 2-12:00:00"
        job.check_text(where, "time", cfg.time, _TIME, expected)
        repeated = sorted(self._own_directives().keys() & cfg.sbatch.keys())
        if repeated:
            raise JobConfigError(
                f"{self._where('sbatch')} sets {', '.join(repeated)}, which the job sets itself. "
                "Use the job's own field."
            )

    def _nodes(self) -> int:
        cfg = self.config
        return cfg.num_processes if cfg.nodes is None else cfg.nodes

    def _own_directives(self) -> dict[str, str]:
        cfg = self.config
        # None leaves an option out.
        options = {
            "job-name": cfg.name,
            "nodes": self._nodes(),
            "ntasks-per-node": cfg.num_processes // max(self._nodes(), 1),
            "cpus-per-task": cfg.cpus_per_process,
            "gpus-per-task": cfg.gpus_per_process or None,
            "mem": cfg.memory_per_node,
            "time": cfg.time,
            "partition": cfg.partition,
            "account": cfg.account,
            "output": cfg.output,
            "open-mode": "append",
            # Sent to the processes, not to the script.
            "signal": f"TERM@{round(cfg.grace_seconds)}",
            "requeue": "" if cfg.max_tries > 1 else None,
        }
        return {
            name: str(value)
            for name, value in options.items()
            if value is not None
        }

    def directives(self) -> dict[str, str]:
        """Options of sbatch by name; "" for options without a value."""
        return {**self._own_directives(), **self.config.sbatch}

    def script(self) -> str:
        """Returns the script for `sbatch`."""
        cfg = self.config
        lines = ["#!/bin/bash"]
        for name, value in self.directives().items():
            lines.append(
                f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"
            )
        lines += ["", "set -eo pipefail", *cfg.setup, "", *self._exports()]
        lines += [
            "# The processes meet on the first node; Slurm tells each of them which one it is.",
            'first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"',
            f'export {job.COORDINATOR_ADDRESS}="$first_node:$((61440 + SLURM_JOB_ID % 4096))"',
            _TOKEN_LINE,
            "",
        ]
        # Without --export, the variables above would depend on the cluster's defaults.
        srun_options = [*self._srun_options(), "--label", "--export=ALL"]
        lines += [
            f"srun {' '.join(srun_options)} {shlex.join(cfg.command)} && exit 0",
            "code=$?",
        ]
        if cfg.max_tries > 1:
            has_tries_left = (
                f"${{SLURM_RESTART_COUNT:-0}} < {cfg.max_tries - 1}"
            )
            lines += [
                "# Not after a wrong command, or `scancel --signal=INT`.",
                f"if (( code != {job.USAGE_EXIT_CODE} && code != {_INTERRUPTED_EXIT_CODE} && "
                f"{has_tries_left} )); then",
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
            ]
        lines.append('exit "$code"')
        return "\n".join(lines) + "\n"

    def _srun_options(self) -> list[str]:
        # srun returns the highest code. With --kill-on-bad-exit that is always 137, of the killed
        # ones; with time to end by themselves, that of the process that failed.
        options = [f"--wait={math.ceil(self.config.grace_seconds)}"]
        if self.config.cpus_per_process is not None:
            # Since Slurm 22.05, srun does not inherit it from sbatch: processes would get one core.
            options.append(f"--cpus-per-task={self.config.cpus_per_process}")
        return options

    def _exports(self) -> list[str]:
        return [
            f"export {name}={shlex.quote(value)}"
            for name, value in self.environment.items()
        ]

    def submit(self, folder: str = "slurm") -> str:
        """Submits the job with submitit, on a machine that has `sbatch`; returns its number.

        Args:
            folder: directory of submitit's files and each process's logs.

        Raises:
            MissingExtraError: if submitit is not installed.
            JobConfigError: if Slurm is missing or rejects the job, or `max_tries` is above 1.
        """
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "submitting needs the package 'submitit', which the extra `launch` installs: "
                "pip install 'weft-jax[launch]'. Or submit the script: weft launch slurm … | "
                "sbatch"
            ) from error
        if self.config.max_tries > 1:
            raise JobConfigError(
                f"{self._where('max_tries')}={self.config.max_tries}, but submitit does not "
                "restart failed jobs. Submit the script, which does: weft launch slurm … | "
                "sbatch"
            )
        directives = self.directives()
        del directives["output"]  # submitit manages the logs
        try:
            # The job runs `python -m`, which without -P imports from the current directory first.
            executor = submitit.SlurmExecutor(
                folder, python=f"{shlex.quote(sys.executable)} -P"
            )
            executor.update_parameters(
                nodes=int(directives.pop("nodes")),
                ntasks_per_node=int(directives.pop("ntasks-per-node")),
                job_name=directives.pop("job-name"),
                additional_parameters={
                    name: value or True for name, value in directives.items()
                },
                setup=[*self.config.setup, *self._exports(), _TOKEN_LINE],
                srun_args=self._srun_options(),
            )
            return executor.submit(
                subprocess.check_call, list(self.config.command)
            ).job_id
        except (OSError, RuntimeError) as error:
            raise JobConfigError(
                f"{self._where('command')} was not submitted: {error}. Submit from a machine "
                "of the cluster, or copy the script there: weft launch slurm … > job.sh"
            ) from error
