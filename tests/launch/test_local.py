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
