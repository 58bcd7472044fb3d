import jax
import pytest

from weft.config import config_class
from weft.errors import ConfigTypeError, RequiredFieldMissingError, StepIntervalError
from weft.trainer.summary_writer.base import (
    BaseWriter,
    CompositeWriter,
    NoOpWriter,
    PeriodicWriter,
    closing_writers,
    processor_zero_only,
)


class Recorder(BaseWriter):
    Config = BaseWriter.Config

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self.calls = []

    def __call__(self, step, values):
        self.calls.append(("call", step, values))

    def log_config(self, config, step=0):
        self.calls.append(("config", config, step))

    def log_checkpoint(self, ckpt_dir, *, state, action, step=0):
        self.calls.append(("checkpoint", ckpt_dir, state, action, step))

    def log_average_step_time(self, step, step_times):
        self.calls.append(("time", step, step_times))

    def flush(self):
        self.calls.append("flush")

    def close(self, *, failed=False):
        self.calls.append("close")


def test_dir_is_required():
    with pytest.raises(RequiredFieldMissingError, match="dir"):
        NoOpWriter.default_config().set(name="writer").instantiate(parent=None)


def test_kinds_of_summaries_are_checked_by_the_config():
    cfg = PeriodicWriter.default_config().set(write_every_n_steps_map={"ImageSummary": 10})
    assert cfg.write_every_n_steps_map == {"ImageSummary": 10}
    with pytest.raises(ConfigTypeError, match="Image"):
        cfg.set(write_every_n_steps_map={"Image": 10})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"write_every_n_steps": 0},
            r"writer\.write_every_n_steps=0; expected an interval of 1 or",
        ),
        (
            {"write_every_n_steps_map": {"ImageSummary": -1}},
            r"writer\.write_every_n_steps_map\['ImageSummary'\]=-1; expected an interval of 1 or",
        ),
    ],
)
def test_interval_of_no_steps(fields, message, tmp_path):
    cfg = PeriodicWriter.default_config().set(name="writer", dir=str(tmp_path), **fields)
    with pytest.raises(StepIntervalError, match=message):
        cfg.instantiate(parent=None)


def test_processor_zero_only(monkeypatch):
    @processor_zero_only
    def write(x):
        """Writes."""
        return x + 1

    assert write(1) == 2
    assert write.__doc__ == "Writes."
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert write(1) is None


def test_disk_error_and_recovery_are_reported_once(caplog):
    class Writer(BaseWriter):
        @config_class
        class Config(BaseWriter.Config):
            pass

        def write(self, fault=None):
            with self._errors_reported():
                if fault:
                    raise fault

    writer = Writer.default_config().set(name="writer", dir="/run").instantiate(parent=None)
    writer.write()
    assert caplog.text == ""
    for _ in range(3):
        writer.write(OSError(28, "No space left on device"))
    assert caplog.text.count("cannot write to /run: [Errno 28] No space left") == 1
    assert "Training continues" in caplog.text
    for _ in range(2):
        writer.write()
    assert caplog.text.count("can write to /run again") == 1
    with pytest.raises(ValueError, match="bug"):
        writer.write(ValueError("bug"))


def test_writers_are_always_closed(tmp_path, caplog):
    class Careful(Recorder):
        def close(self, *, failed=False):
            self.calls.append(failed)
            if self.name == "first":
                raise ConnectionError("the server is gone")

    cfg = Careful.default_config().set(dir=str(tmp_path))
    first, second = (cfg.set(name=name).instantiate(parent=None) for name in ("first", "second"))
    try:
        raise ConnectionError("an error before, after which the training is tried again")
    except ConnectionError:
        with closing_writers([first, second]):
            pass
    with pytest.raises(ValueError), closing_writers([first, second]):
        raise ValueError("the training fails")
    assert first.calls == second.calls == [False, True]
    assert caplog.messages == ["first was not closed: ConnectionError: the server is gone"] * 2
    composite = CompositeWriter.default_config().set(
        name="all", dir=str(tmp_path), writers={"first": cfg, "second": cfg}
    )
    with closing_writers([both := composite.instantiate(parent=None)]):
        pass
    assert [writer.calls for writer in both.writers] == [[False], [False]]
    assert caplog.messages[2:] == ["all.first was not closed: ConnectionError: the server is gone"]
