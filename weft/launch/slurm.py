"""`SlurmJob`: a script for `sbatch`, in which `srun` starts the processes.

One node's death, or one process's, ends the step (`--kill-on-bad-exit`). Before the time limit the
processes get a SIGTERM, early enough to save; with `max_tries` the job then stands in the queue
again, and goes on where it was.
"""

import shlex
import subprocess
from collections.abc import Sequence

from weft.config import config_class
from weft.errors import JobConfigError, MissingExtraError
from weft.launch.job import COORDINATOR_ADDRESS, RENDEZVOUS_TOKEN, TRY_AGAIN, Job, check_text

# Drawn when the job starts, so that it is in no file; srun hands it on to the processes.
_TOKEN_LINE = f'export {RENDEZVOUS_TOKEN}="$(od -An -N16 -tx1 /dev/urandom | tr -d " \\n")"'
_TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}"


class SlurmJob(Job):
    """Processes on the nodes of a Slurm cluster.

    >>> cfg = SlurmJob.default_config().set(name="lm", command=["weft", "train", "lm"])
    >>> print(cfg.set(num_processes=2, time="8:00:00").instantiate().script().splitlines()[1])
    #SBATCH --job-name=lm
    """

    @config_class
    class Config(Job.Config):
        """Configures a SlurmJob.

        Attributes:
            nodes: over how many nodes the processes are spread; None for one process per node.
            time: the time limit, as Slurm writes it: 90 (minutes), 8:00:00, 2-12:00:00.
            partition: where to run; None for the cluster's default.
            account: who pays; None for the person's default.
            cpus_per_process: CPU cores for each.
            memory_per_node: such as 64G.
            output: the file of all output, with Slurm's patterns: %x the name, %j the job's number.
            sbatch: further options of sbatch by name, such as {"qos": "high", "exclusive": ""}.
            setup: lines of the shell before the processes start, such as "module load cuda".
        """

        nodes: int | None = None
        time: str | None = None
        partition: str | None = None
        account: str | None = None
        cpus_per_process: int | None = None
        memory_per_node: str | None = None
        output: str = "%x-%j.log"
        sbatch: dict[str, str] = {}
        setup: Sequence[str] = []

    def __init__(self, config: Config):
        super().__init__(config)
        cfg = self.config
        nodes = self._nodes()
        if nodes < 1 or cfg.num_processes % nodes:
            raise JobConfigError(
                f"{self._where('nodes')}={cfg.nodes} does not divide "
                f"num_processes={cfg.num_processes}; each node runs equally many."
            )
        where = f"SlurmJob {cfg.name!r}"
        one_word = ("one word: a directive of sbatch ends at a space", r"[^\s'\"\\]+")
        for field in ("name", "partition", "account", "output", "memory_per_node"):
            value = getattr(cfg, field)
            if value is not None:
                check_text(where, field, value, one_word[1], one_word[0])
        for name, value in cfg.sbatch.items():
            check_text(where, "sbatch", name, r"[a-z][a-z0-9-]*", "names as in --name=value")
            check_text(where, f"sbatch[{name!r}]", value, r"[^\s'\"\\]*", one_word[0])
        if cfg.time is not None:
            expected = "a time of Slurm's: 90 (minutes), 8:00:00 or 2-12:00:00"
            check_text(where, "time", cfg.time, _TIME, expected)
        both = sorted(self._own_directives().keys() & cfg.sbatch.keys())
        if both:
            raise JobConfigError(
                f"{self._where('sbatch')} sets {', '.join(both)}, which the job sets itself. Use "
                "the job's own field for it."
            )

    def _nodes(self) -> int:
        cfg = self.config
        return cfg.num_processes if cfg.nodes is None else cfg.nodes

    def _own_directives(self) -> dict[str, str]:
        cfg = self.config
        wanted = {
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
            # To the processes, not to the script.
            "signal": f"TERM@{round(cfg.grace_seconds)}",
            "requeue": "" if cfg.max_tries > 1 else None,
        }
        return {name: str(value) for name, value in wanted.items() if value is not None}

    def directives(self) -> dict[str, str]:
        """The options of sbatch by name; "" for one that takes no value."""
        return {**self._own_directives(), **self.config.sbatch}

    def script(self) -> str:
        """The script, for `sbatch`."""
        cfg = self.config
        lines = ["#!/bin/bash"]
        for name, value in self.directives().items():
            lines.append(f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}")
        lines += ["", "set -eo pipefail", *cfg.setup, ""]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self._variables()]
        lines += [
            "# The processes meet on the first node; Slurm tells each of them which one it is.",
            'first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"',
            f'export {COORDINATOR_ADDRESS}="$first_node:$((61440 + SLURM_JOB_ID % 4096))"',
            _TOKEN_LINE,
            "",
        ]
        # Without --export, what is set above would depend on the cluster's defaults.
        lines += [
            f"srun {' '.join(self._srun_options())} --label --export=ALL "
            f"{shlex.join(cfg.command)} && exit 0",
            "code=$?",
        ]
        if cfg.max_tries > 1:
            lines += [
                f"if (( ${{SLURM_RESTART_COUNT:-0}} < {cfg.max_tries - 1} )); then",
                '  scontrol requeue "$SLURM_JOB_ID"',
                "fi",
            ]
        return "\n".join([*lines, 'exit "$code"']) + "\n"

    def _srun_options(self) -> list[str]:
        cores = self.config.cpus_per_process
        # Since Slurm 22.05, srun does not take them from sbatch: a process would have one core.
        of_cores = [] if cores is None else [f"--cpus-per-task={cores}"]
        return ["--kill-on-bad-exit=1", *of_cores]

    def _variables(self) -> list[tuple[str, str]]:
        again = TRY_AGAIN if self.config.max_tries > 1 else {}
        return list({**self.environment, **again}.items())

    def submit(self, folder: str = "slurm") -> str:
        """Submits the job by submitit, from a machine that has `sbatch`.

        Inside of it the processes learn from Slurm's own variables where they meet.

        Args:
            folder: where submitit keeps its files and the logs of each process.

        Returns:
            The job's number.

        Raises:
            MissingExtraError: if submitit is not installed.
            JobConfigError: if there is no Slurm here, it refuses, or `max_tries` is above 1.
        """
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                "submitting needs the package 'submitit', which the extra `launch` installs: "
                "pip install 'weft[launch]'. Or submit the script: weft launch slurm … | sbatch"
            ) from error
        if self.config.max_tries > 1:
            raise JobConfigError(
                f"{self._where('max_tries')}={self.config.max_tries}, and submitit does not start "
                "again what failed. Submit the script, which does: weft launch slurm … | sbatch"
            )
        given = self.directives()
        nodes, per_node = int(given.pop("nodes")), int(given.pop("ntasks-per-node"))
        del given["output"]  # submitit names the logs, and reads them
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self._variables()]
        try:
            executor = submitit.SlurmExecutor(folder)
            executor.update_parameters(
                nodes=nodes,
                ntasks_per_node=per_node,
                job_name=given.pop("job-name"),
                additional_parameters={name: value or True for name, value in given.items()},
                setup=[*self.config.setup, *exports, _TOKEN_LINE],
                srun_args=self._srun_options(),
            )
            return executor.submit(subprocess.check_call, list(self.config.command)).job_id
        except (OSError, RuntimeError) as error:
            raise JobConfigError(
                f"{self._where('command')} was not submitted: {error}. Submit from a machine of "
                "the cluster, or take the script there: weft launch slurm … > job.sh"
            ) from error
