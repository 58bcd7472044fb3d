import sys

import pytest

from weft.cli import main
from weft.cli.arguments import parse_arguments
from weft.cli.train import JOBS, job_name, make_job, program
from weft.errors import CommandLineError
from weft.launch.jobset import JobSetJob
from weft.launch.local import LocalJob
from weft.launch.slurm import SlurmJob

IMAGE = ["--job", "image=registry/weft:1"]


def made(*words):
    return make_job(parse_arguments(["launch", *words]))


def test_job_runs_weft_train():
    job = made("local", "-n", "3", "lm-tiny", "max_step=7")
    assert isinstance(job, LocalJob)
    assert (job.config.name, job.config.num_processes) == ("lm-tiny", 3)
    python = [sys.executable, "-P", "-m", "weft"]
    assert job.config.command == [*python, "train", "lm-tiny", "max_step=7"]
    job = made("local", "-n", "3:4", "--job", "max_tries=2", "lm-tiny")
    assert (job.config.min_processes, job.config.num_processes) == (3, 4)
    assert isinstance(made("slurm", "-n", "2"), SlurmJob)
    job = made("k8s", "-n", "2", *IMAGE, "lm")
    assert isinstance(job, JobSetJob) and job.config.command == ["weft", "train", "lm"]


def test_job_has_the_mesh_of_weft_train():
    mesh = ["--mesh", "fsdp=4,model=2"]
    job = made("slurm", "-n", "2", *mesh, "lm-tiny", "max_step=7")
    assert job.config.command == ["weft", "train", *mesh, "lm-tiny", "max_step=7"]
    with pytest.raises(CommandLineError, match="there is no axis 'fsdq'"):
        made("local", "-n", "2", "--mesh", "fsdq=4", "lm-tiny")
    with pytest.raises(CommandLineError, match="no mesh rule of the config matches"):
        made("k8s", "-n", "2", *IMAGE, "--mesh-selector", "gpu-8", "lm-tiny")


def test_local_directory_is_checked_before_processes_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LocalJob, "run", lambda self: 0)
    words = ["lm-tiny", "dir=run"]
    assert main(["launch", "local", "-n", "2", *words]) == 0
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "run" / "config.txt").write_text("max_step: 1\n", encoding="utf-8")
    assert main(["launch", "local", "-n", "2", *words]) == 2
    err = capsys.readouterr().err
    assert "\n  weft launch local -n 2 lm-tiny dir=run-2\n" in err.replace(program("weft"), "weft")
    assert main(["launch", "local", "--fresh", "-n", "2", *words]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.1"]
    assert "moved the earlier run from run to run.1" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["lm", "configs/Wide_1.txt", "runs/lm/", "é"])
def test_job_name_is_valid_for_every_scheduler(recipe):
    name = job_name(recipe)
    cfg = JobSetJob.default_config().set(name=name, command=["weft"], image="i")
    assert cfg.instantiate().config.name == name


@pytest.mark.parametrize("where", JOBS)
def test_help_names_every_field(where, capsys):
    assert main(["launch", where, "--help"]) == 0
    told = capsys.readouterr().out
    fields = set(JOBS[where].default_config()._fields()) - {"klass", "command", "num_processes"}
    assert [name for name in fields if name not in told] == []
    assert f"weft launch {where} -n 2" in told


def test_script_and_the_manifest_are_printed(capsys):
    assert main(["launch", "slurm", "-n", "2", "lm-tiny"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=lm-tiny\n")
    assert main(["launch", "k8s", "-n", "2", *IMAGE, "lm-tiny"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("apiVersion: v1\nkind: Secret\n")
    assert "\n---\napiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n" in printed.out
    assert "these pods share no directory" in printed.err and "volume_claim=NAME" in printed.err
    claim = ["--job", "volume_claim=runs"]
    assert main(["launch", "k8s", "-n", "2", *IMAGE, *claim, "lm-tiny"]) == 0
    assert capsys.readouterr().err == ""


def test_remote_weights_are_not_checked_locally(capsys):
    words = ["-n", "2", "--job", "volume_claim=runs", *IMAGE, "lm-lora", "base=/runs/base"]
    assert main(["launch", "k8s", *words]) == 0
    printed = capsys.readouterr()
    assert '- "base=/runs/base"' in printed.out
    assert (
        "weft launch: not checked, because it is not on this machine: '/runs/base/" in printed.err
    )
    assert main(["launch", "slurm", "-n", "2", "lm-lora", "base=/runs/base"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_submitted_job_id_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(SlurmJob, "submit", lambda self: f"{self.config.num_processes}00")
    assert main(["launch", "slurm", "-n", "2", "--submit", "lm-tiny"]) == 0
    assert capsys.readouterr().out == "200\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["local", "-n", "2", "lm-tyni"], "lm-tiny"),
        (["local", "-n", "2", "lm-tiny", "max_stepp=3"], "max_step"),
        (["local", "-n", "2", "--job", "log_dirr=x", "lm-tiny"], "log_dir"),
        (["local", "-n", "0", "lm-tiny"], "num_processes=0; expected 1 or more"),
        (["local", "lm-tiny"], "-n"),
        (["local", "-n", "two", "lm-tiny"], "'two'; expected N or MIN:N"),
        (["local", "-n", "3:4", "lm-tiny"], "max_tries"),
        (["k8s", "-n", "2", "lm-tiny"], "image"),
        (["slurm", "-n", "4", "--job", "nodes=3", "lm-tiny"], "does not divide"),
        (["lokal", "-n", "2"], "lokal"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_invalid_input_is_rejected_before_start(words, message, capsys, monkeypatch):
    monkeypatch.setattr(LocalJob, "run", lambda self: pytest.fail("it was started"))
    assert main(["launch", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
