import pytest

from weft.errors import JobConfigError
from weft.launch.job import Job, check_text


def job(**fields):
    return Job.default_config().set(**({"name": "lm", "command": ["weft"]} | fields)).instantiate()


def test_all_processes_get_the_process_count():
    environment = job(num_processes=3, env={"HF_HOME": "/data"}).environment
    assert environment == {"HF_HOME": "/data", "JAX_NUM_PROCESSES": "3"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": []}, r"Job 'lm': command is empty\. Write a program .* separate strings"),
        ({"num_processes": 0}, r"num_processes=0; expected 1 or more"),
        ({"gpus_per_process": -1}, r"gpus_per_process=-1; expected 0 or more"),
        ({"max_tries": 0}, r"max_tries=0; expected 1 or more"),
        ({"grace_seconds": 0}, r"grace_seconds=0; expected a time above 0"),
        ({"env": {"A-B": "1"}}, r"env has 'A-B', which is not .* underscores"),
        ({"env": {"JAX_PROCESS_ID": "1"}}, r"env sets JAX_PROCESS_ID, .* Remove it"),
        ({"env": {"WEFT_RENDEZVOUS_TOKEN": "x"}}, r"env sets WEFT_RENDEZVOUS_TOKEN, .* Remove it"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_job_is_rejected(fields, message):
    with pytest.raises(JobConfigError, match=message):
        job(**fields)


def test_text_mismatch_names_expected_form():
    check_text("Job 'lm'", "name", "ab", "[a-z]+", "small letters")
    with pytest.raises(JobConfigError, match=r"Job 'lm': name='ab1'; expected small letters\."):
        check_text("Job 'lm'", "name", "ab1", "[a-z]+", "small letters")
