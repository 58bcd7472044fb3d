"""The syntax of a script for sbatch, as Slurm's manual has it: its directives and their values."""

import re

_WORD = r"\S+"
_TIME = r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d"
_NUMBER = r"[1-9]\d*"
_FLAG = None

# The long options that take part in these tests, and the form of what follows `=`.
OPTIONS = {
    "account": _WORD,
    "comment": _WORD,
    "constraint": _WORD,
    "cpus-per-task": _NUMBER,
    "error": _WORD,
    "exclusive": _FLAG,
    "gpus-per-node": r"([a-z0-9_]+:)?[1-9]\d*",
    "gpus-per-task": r"([a-z0-9_]+:)?[1-9]\d*",
    "job-name": _WORD,
    "mem": r"\d+[KMGT]?",
    "nodes": r"[1-9]\d*(-[1-9]\d*)?",
    "ntasks-per-node": _NUMBER,
    "open-mode": r"append|truncate",
    "output": _WORD,
    "partition": _WORD,
    "qos": _WORD,
    "requeue": _FLAG,
    "signal": r"([RB]{1,2}:)?(\d+|[A-Z0-9]+)(@\d+)?",
    "time": _TIME,
    "wait": _FLAG,
    "wckey": _WORD,
}


def parse_option(word: str) -> tuple[str, str]:
    """Returns the name and the value of `--name=value` or `--name`, as directives() does."""
    option = re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", word)
    assert option, f"no option: {word}"
    name, value = option.groups()
    assert name in OPTIONS, f"unknown option: {word}"
    form = OPTIONS[name]
    if form is _FLAG:
        assert value is None, f"takes no value: {word}"
    else:
        assert value and re.fullmatch(form, value), f"not of the form {form}: {word}"
    return name, value or ""


def directives(script: str) -> dict[str, str]:
    """Returns the options that sbatch would read from a script; an AssertionError for what it would
    not.

    sbatch reads lines that begin with `#SBATCH` up to the first command; a line holds options as a
    command line does, and text after a blank and `#` is a comment.
    """
    lines = script.splitlines()
    assert lines[0].startswith("#!"), "sbatch wants a script that names its interpreter"
    found: dict[str, str] = {}
    commands = False
    for line in lines[1:]:
        if line.startswith("#SBATCH"):
            assert not commands, f"sbatch does not read what follows a command: {line}"
            name, value = parse_option(line.removeprefix("#SBATCH "))
            assert name not in found, f"twice: {line}"
            found[name] = value
        elif line.strip() and not line.startswith("#"):
            commands = True
    assert commands, "nothing to run"
    return found
