import re

import pytest

from weft.errors import JobConfigError
from weft.launch.local import LocalJob


def job(script, **fields):
    cfg = LocalJob.default_config().set(name="t", command=["sh", "-c", script], num_processes=2)
    return cfg.set(failure_grace_seconds=0.5).set(**fields).instantiate()


def test_processes_get_their_environment(capsys):
    script = "echo $JAX_PROCESS_ID/$JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS $JAX_PLATFORMS $A"
    assert job(script, env={"A": "b"}).run() == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    address = lines[0].split()[2]
    assert address.startswith("127.0.0.1:")
    assert lines == [f"[{i}] {i}/2 {address} cpu b" for i in range(2)]


def test_each_try_has_a_new_token(tmp_path, capfd):
    script = 'echo "$WEFT_RENDEZVOUS_TOKEN" >> tokens; exit 3'
    made = job(f"cd {tmp_path}; {script}", num_processes=1, max_tries=2)
    assert made.run() == 3
    first, second = (tmp_path / "tokens").read_text(encoding="utf-8").split()
    assert len(first) == 32 and first != second
    assert first not in "".join(capfd.readouterr())


def test_failure_report_has_last_lines(capsys):
    script = 'echo "step $JAX_PROCESS_ID"; [ $JAX_PROCESS_ID = 0 ] && exit 4; sleep 60'
    assert job(script).run() == 4
    told = capsys.readouterr().err
    assert "weft launch: process 0 of 2 (pid " in told
    assert ") ended with exit code 4 after" in told and "its exit code is 4" in told
    assert "its last lines:\n  [0] step 0\n" in told
    assert "process 1 was ended by SIGTERM at" in told


def test_logs_keep_each_try(tmp_path, capsys):
    (tmp_path / "process-0.log").write_text("half a line", encoding="utf-8")
    script = f"cd {tmp_path}; [ -e second ] && exit 4; touch second; echo first; exit 3"
    assert job(script, num_processes=1, max_tries=2, log_dir=str(tmp_path)).run() == 4
    text = (tmp_path / "process-0.log").read_text(encoding="utf-8")
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    first, second = (rf"weft launch: try {i} of 2, 1 process\(es\), {time}\n" for i in (1, 2))
    assert re.fullmatch(rf"half a line\n{first}first\n\n{second}", text), text
    # The second one has written nothing.
    assert capsys.readouterr().err.count("its last lines:\n  [0] first\n") == 1


def test_wrong_command_is_not_tried_again(capsys):
    assert job("exit 2", num_processes=1, max_tries=3).run() == 2
    assert "restarting" not in capsys.readouterr().err


def test_gpus_are_split_among_processes(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS")
    two = job("true", gpus_per_process=2)
    found = [two.process_environment(i, "h:1") for i in range(2)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["0,1", "2,3"]
    assert "JAX_PLATFORMS" not in found[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert two.process_environment(1, "h:1")["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(JobConfigError, match=r"needs 4 GPUs, but .*4,5,6 has 3\. Request fewer"):
        two.run()


_COUNT = "n=$JAX_NUM_PROCESSES; i=$JAX_PROCESS_ID; [ $i = 0 ] && echo $n >> counts; "


def counts(tmp_path):
    return [int(line) for line in (tmp_path / "counts").read_text(encoding="utf-8").split()]


def test_next_try_is_without_the_process_that_failed(tmp_path, capsys):
    script = f"cd {tmp_path}; {_COUNT} [ $n$i = 31 ] && sleep 0.2 && kill -9 $$; sleep 0.4"
    assert job(script, num_processes=3, min_processes=2, max_tries=2).run() == 0
    assert counts(tmp_path) == [3, 2]
    told = capsys.readouterr().err
    assert "restarting with 2 of 3 processes; all are started again after 600 s; tries" in told


def test_too_few_processes_are_all_of_them_again(tmp_path, capsys):
    script = f"cd {tmp_path}; {_COUNT} [ $i = 1 ] && sleep 0.2 && exit 3; sleep 1"
    assert job(script, num_processes=3, min_processes=2, max_tries=4).run() == 3
    assert counts(tmp_path) == [3, 2, 3, 2]
    assert "restarting all processes" in capsys.readouterr().err


def test_number_that_does_not_fit_is_not_used(tmp_path):
    fails = "[ $n$i = 31 ] && sleep 0.2 && kill -9 $$; [ $n$i = 20 ] && exit 2; sleep 0.4"
    script = f"cd {tmp_path}; {_COUNT} {fails}"
    made = job(script, num_processes=3, min_processes=2, max_tries=3)
    assert made.run() == 128 + 9
    assert counts(tmp_path) == [3, 2, 3]


def test_processes_rejoin(tmp_path):
    # Three fail once, two run until they are stopped.
    script = (
        f"cd {tmp_path}; {_COUNT} [ $n = 2 ] && {{ trap 'exit 143' TERM; sleep 60 & wait; }}; "
        "[ $i = 0 ] && [ $(wc -l < counts) = 1 ] && exit 3; sleep 0.2"
    )
    made = job(script, num_processes=3, min_processes=2, max_tries=2, rejoin_seconds=0.5)
    assert made.run() == 0
    assert counts(tmp_path) == [3, 2, 3]


def test_spare_gpu_takes_over(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.delenv("JAX_PLATFORMS")
    script = (
        f'cd {tmp_path}; echo "$CUDA_VISIBLE_DEVICES" >> gpus; [ "$CUDA_VISIBLE_DEVICES" != 4 ]'
    )
    assert job(script, gpus_per_process=1, max_tries=2, num_processes=1).run() == 0
    assert (tmp_path / "gpus").read_text(encoding="utf-8").split() == ["4", "5"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"min_processes": 3, "max_tries": 2}, "min_processes=3; expected 1 to num_processes=2"),
        ({"min_processes": 0, "max_tries": 2}, "min_processes=0; expected 1 to"),
        ({"min_processes": 1}, "min_processes=1 is for another try, and max_tries=1"),
        ({"rejoin_seconds": 0}, "rejoin_seconds=0; expected a time above 0"),
    ],
)
def test_numbers_of_processes_that_do_not_fit(fields, text):
    with pytest.raises(JobConfigError, match=text):
        job("true", **fields)
