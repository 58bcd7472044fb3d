"""The command line as a person meets it: help, wrong words, exit codes, a start without delay."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from weft.cli import Output, continue_without_output, main
from weft.cli.arguments import parse_arguments

HELP = {
    "": ["Trains JAX models."],
    "train": [
        "Train a recipe, or continue a run.",
        "Examples:\n  weft train\n",
        "continues from it.",
    ],
    "launch": ["Train with several processes: on this machine, with Slurm, or with Kubernetes."],
    "launch local": [
        "-n [MIN:]N [--job FIELD=VALUE ...] [--allow NAME] [RECIPE]",
        "  name=lm  ",
        "-n 2 lm",
    ],
    "launch slurm": ["-n N [--job FIELD=VALUE ...] [--allow NAME] [RECIPE]", "Examples:\n  weft l"],
    "launch k8s": ["-n N [--job FIELD=VALUE ...] [--allow NAME] [RECIPE]", "| kubectl apply -f -"],
    "recipes": ["List the recipes, the default one first."],
    "config": ["show", "diff"],
    "config show": ["Print a config as text that Weft can read."],
    "config diff": ["Print the differences between two configs; exit code 1 if there are any."],
    "sample": ["Generate text from a trained run, or a Hugging Face folder."],
    "inspect": [
        "Print what a run's checkpoints or a Hugging Face folder hold, without loading it."
    ],
    "report": ["Write the report of a run, or a comparison of several, as one HTML page."],
    "export": ["Write a run's parameters as safetensors, or as a Hugging Face checkpoint."],
    "tabulate": ["Print the model as a table, without allocating its arrays."],
    "check": ["Compile a recipe for a mesh, and print its sharding; exit code 1 if it does not"],
    "run-as-flax": ["Run a program that imports flax on Weft, without editing it."],
    "lr-find": ["Suggest a learning rate, from a short run with increasing rates."],
}


@pytest.mark.parametrize("command", HELP)
def test_help_describes_command_and_all_arguments(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: weft {command}".rstrip())
    for part in HELP[command]:
        assert part in text
    for section in re.findall(r"(?:arguments|options):\n((?:  .*\n)+)", text):
        for line in re.sub(r"\n {9,}", "  ", section).splitlines():
            assert re.search(r"\S {2,}\S", line) or line in ("  COMMAND", "  WHERE", "  ACTION")


def test_weft_alone_shows_what_to_do_first(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == "" and all(len(line) <= 80 for line in out.splitlines())
    commands = re.findall(r"^  weft (.*?)  ", out, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        parse_arguments(command.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["sample"], "RUN|FOLDER"),
        (["sample", "x", "--tokens", "many"], "invalid int value: 'many'"),
        (["config", "diff", "lm"], "required: B"),
        (["report", "runs/none"], "'runs/none' is not the directory of a run"),
        (["export", "runs/lm"], "required: --to"),
        (["launch", "local", "lm"], "required: -n"),
        (["train", "lm", "tiny"], "'tiny' is neither the only recipe nor of the form path=value"),
        (["train", "lmm"], "unknown recipe 'lmm'. Did you mean 'lm"),
        (["train", "runs/none"], "there is no file or directory 'runs/none'"),
        (["config", "show", "lm-tny"], "Did you mean 'lm-tiny'"),
        (["tabulate", "x"], "unknown recipe 'x'. There are: "),
        (["sample", "runs/none"], "'runs/none' is not a directory"),
    ],
)
def test_invalid_arguments_exit_with_code_2(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_light_commands_do_not_import_jax():
    code = (
        "import sys; from weft.cli import main\n"
        "for argv in (['--help'], ['recipes'], ['train', '--help'], ['trian']): main(argv)\n"
        "assert not {'jax', 'rich', 'optax', 'numpy'} & set(sys.modules), 'something slow'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the malloc of glibc")
@pytest.mark.parametrize(
    ("environment", "is_kept"),
    [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False), ({"JAX_PLATFORMS": "cuda"}, None)],
)
def test_freed_memory_is_kept_for_computations_on_cpus(environment, is_kept, tmp_path):
    """A block of 100 MB, in a new thread as XLA's are, is cleared by the kernel once or each time.

    With a plugin of an accelerator installed and wanted, `malloc` stays as it is.
    """
    if is_kept is None:
        (tmp_path / "jax_plugins").mkdir()
    program = """
import resource, sys, threading
from weft.cli import main

main(["--version"])
assert "jax" not in sys.modules

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = bytearray(100_000_000)
    memory[::4096] = memory[::4096]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    first, second = faults(), faults()
    print(first > 1000, second > 1000)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd(), **environment}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
    )
    assert result.stdout.splitlines()[-1:] == [f"True {not is_kept}"], result.stderr


def test_ctrl_c_before_a_run_ends_without_a_traceback(monkeypatch, capsys):
    def command(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.arguments.list_recipes", command)
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == ""


QUICK = [["recipes"], ["--help"]]  # one that returns, and one that argparse ends


quick = pytest.mark.parametrize("argv", QUICK, ids=" ".join)


def run_with(argv, redirection):
    """Returns exit code and standard error of a command with a shell redirection."""
    code = "import sys; from weft.cli import main; sys.exit(main())"
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", code, *argv]
    done = subprocess.run(shell, capture_output=True, encoding="utf-8", timeout=100)
    return done.returncode, done.stderr


@quick
def test_closed_pipe_is_not_an_error(argv):
    assert run_with(argv, "> >(exec true)") == (0, "")


@pytest.mark.parametrize(
    "argv", [*QUICK, pytest.param(["tabulate", "lm-tiny"], marks=pytest.mark.long)], ids=" ".join
)
def test_output_error_is_reported_in_one_line(argv):
    message = "weft: the output cannot be written: No space left on device\n"
    assert run_with(argv, ">/dev/full") == (1, message)


@pytest.mark.parametrize(
    "argv",
    [*QUICK, pytest.param(["launch", "slurm", "-n", "2", "lm"], marks=pytest.mark.long)],
    ids=" ".join,
)
def test_closed_stdout_is_not_an_error(argv):
    assert run_with(argv, ">&-") == (0, "")


def test_exit_code_is_correct_without_stderr():
    assert run_with(["trian"], ">/dev/full 2>/dev/full")[0] == 2
    assert run_with(["recipes"], ">/dev/full 2>/dev/full")[0] == 1


def test_long_command_without_output_warns_once(caplog):
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        contextlib.redirect_stdout(Output(full)) as output,
    ):
        continue_without_output()
        print("first", flush=True)
        print("second", flush=True)
    assert output.is_optional
    reason = "the stream cannot be written: [Errno 28] No space left on device"
    assert caplog.messages == [f"no further output, as {reason}"]


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("ascii", rb"1 \xd7 \u2192 \udcf3"), ("cp1252", b"1 \xd7 \\u2192 \\udcf3")],
)
def test_text_that_the_output_cannot_encode_is_escaped(encoding, written):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    with contextlib.redirect_stdout(Output(stream)):
        print("1 × → \udcf3", end="", flush=True)
    assert buffer.getvalue() == written


def test_control_characters_in_errors_are_escaped(capsys):
    assert main(["train", "runs/\x1b[2Jnone"]) == 2
    assert "\x1b" not in capsys.readouterr().err
