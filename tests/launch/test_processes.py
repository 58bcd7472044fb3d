import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest

from weft.errors import JobConfigError
from weft.launch.processes import ProcessGroup, last_lines


def run(script, num=2, **kwargs):
    """Runs a script of the shell as several processes; `$ID` is the number of each."""
    said = []
    kwargs = {"grace_seconds": 20, "failure_grace_seconds": 0.5} | kwargs
    group = ProcessGroup(
        ["sh", "-c", script],
        [{**os.environ, "ID": str(i)} for i in range(num)],
        say=lambda index, line: said.append((index, line)),
        **kwargs,
    )
    return group.run(), said


def signalled(number, script, **kwargs):
    """Runs a group, and signals this process once all have printed "ready"."""
    ready = threading.Semaphore(0)

    def say(index, line):
        said.append((index, line))
        if line == "ready":
            ready.release()

    def send():
        for _ in range(2):
            assert ready.acquire(timeout=20)
        os.kill(os.getpid(), number)

    said = []
    kwargs = {"grace_seconds": 20, "failure_grace_seconds": 0.5} | kwargs
    group = ProcessGroup(
        ["sh", "-c", script],
        [{**os.environ, "ID": str(i)} for i in range(2)],
        say=say,
        **kwargs,
    )
    thread = threading.Thread(target=send)
    thread.start()
    outcome = group.run()
    thread.join()
    return outcome, said


def test_killed_process_ends_unresponsive_others():
    start = time.monotonic()
    outcome, _ = run(
        '[ $ID = 1 ] && { sleep 0.5; echo "step 7"; kill -9 $$; }; '
        'trap "" TERM; while :; do sleep 1; done'
    )
    assert time.monotonic() - start < 10
    assert (outcome.failed.index, outcome.failed.code) == (1, 137)
    assert outcome.failed.signal_name == "SIGKILL" and outcome.failed.last_lines == ("step 7",)
    assert outcome.code == 137
    assert [(e.index, e.signal_name) for e in outcome.ended] == [(1, "SIGKILL"), (0, "SIGKILL")]


def test_first_failure_is_named_and_sets_exit_code():
    script = 'trap "exit 9" TERM; [ $ID = 2 ] && sleep 0.5 && exit 3; while :; do sleep 0.1; done'
    outcome, _ = run(script, num=3, failure_grace_seconds=20)
    assert (outcome.failed.index, outcome.code) == (2, 3)
    assert sorted(e.code for e in outcome.ended) == [3, 9, 9]


@pytest.mark.parametrize(("command", "is_stop"), [("exit 143", True), ("kill -TERM $$", False)])
def test_exit_code_tells_a_handled_signal_from_a_death(command, is_stop):
    outcome, said = run(
        'trap "sleep 0.3; echo saved; exit 143" TERM; '
        f"[ $ID = 1 ] && trap - TERM && sleep 0.3 && {command}; "
        "while :; do sleep 0.05; done",
        grace_seconds=20,
        failure_grace_seconds=20,
    )
    assert outcome.code == 143 and (0, "saved") in said
    assert (outcome.failed is None) == is_stop
    assert outcome.stopped_by == ("SIGTERM" if is_stop else None)


def test_handled_signal_leaves_the_others_time():
    outcome, said = signalled(
        signal.SIGTERM,
        'trap "[ $ID = 1 ] || sleep 0.5; echo saved; exit 143" TERM; echo ready; '
        "while :; do sleep 0.05; done",
        failure_grace_seconds=0.01,
    )
    assert outcome.stopped_by == "SIGTERM" and outcome.failed is None and outcome.code == 143
    assert [line for _, line in said].count("saved") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded_and_saving_gets_time(number):
    before = signal.getsignal(number)
    outcome, said = signalled(
        number,
        f'trap "sleep 0.3; echo saved; exit 0" {number.name.removeprefix("SIG")}; echo ready; '
        "while :; do sleep 0.05; done",
        failure_grace_seconds=0.01,
    )
    assert outcome.stopped_by == number.name and outcome.failed is None and outcome.code == 0
    assert [line for _, line in said].count("saved") == 2
    assert signal.getsignal(number) is before


@pytest.fixture
def hang_up():
    """Sets what SIGHUP does, which is nothing where the tests themselves run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_hangup_stops_processes_unless_ignored(hang_up):
    hang_up(signal.SIG_DFL)
    script = 'trap "exit 0" TERM; echo ready; while :; do sleep 0.05; done'
    outcome, _ = signalled(signal.SIGHUP, script)
    assert outcome.stopped_by == "SIGTERM" and outcome.code == 0
    hang_up(signal.SIG_IGN)
    outcome, _ = signalled(signal.SIGHUP, "echo ready; sleep 0.3")
    assert outcome.stopped_by is None and outcome.code == 0


def test_unresponsive_process_is_killed():
    outcome, _ = signalled(
        signal.SIGTERM,
        'trap "" TERM; echo ready; while :; do sleep 1; done',
        grace_seconds=0.3,
    )
    assert outcome.stopped_by == "SIGTERM" and outcome.code == 137 and outcome.failed is None


GROUP = """
import os, sys
from weft.launch.processes import ProcessGroup
script = 'trap "echo saved >> $OUT; exit 0" TERM; echo ready; while :; do sleep 0.05; done'
ProcessGroup(
    ["sh", "-c", script],
    [dict(os.environ)] * 2,
    # In one piece, for there is a thread for each process.
    say=lambda index, line: os.write(1, f"{line}\\n".encode()),
    grace_seconds=20,
    failure_grace_seconds=20,
).run()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent")
def test_death_of_parent_stops_children(tmp_path):
    out = tmp_path / "out"
    group = subprocess.Popen(
        [sys.executable, "-c", GROUP],
        env={**os.environ, "OUT": str(out)},
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    with group:
        try:
            assert [group.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        finally:
            group.kill()
    deadline = time.monotonic() + 20
    while not out.exists() or out.read_text(encoding="utf-8").count("saved") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_logs_are_files_with_known_last_lines(tmp_path):
    paths = [str(tmp_path / "logs" / f"{i}.log") for i in range(2)]
    # The one that fails waits for the other, which would be ended with it.
    here = shlex.quote(str(tmp_path / "written"))
    script = f"""
        [ $ID = 0 ] && echo out 0 && touch {here} && exit 0
        while [ ! -e {here} ]; do sleep 0.05; done
        echo out 1; exit 1
    """
    outcome, said = run(script, log_paths=paths)
    assert said == [] and outcome.failed.last_lines == ("out 1",)
    assert last_lines(paths[0]) == ("out 0",)


def test_missing_program_is_rejected():
    group = ProcessGroup(
        ["no-such-program"], [dict(os.environ)], say=print, grace_seconds=1, failure_grace_seconds=1
    )
    with pytest.raises(JobConfigError, match=r"\['no-such-program'\] cannot be started: .*PATH"):
        group.run()


def test_unwritable_log_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        JobConfigError, match=r"the log .*file.* cannot be written.*another log_dir"
    ):
        run("true", num=1, log_paths=[str(tmp_path / "file" / "0.log")])
