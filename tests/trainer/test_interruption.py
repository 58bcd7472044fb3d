import signal
import threading

import jax
import pytest

from weft.trainer.interruption import GracefulStop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_the_handler_restored(number):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert stop.signal_name is None
        signal.raise_signal(number)
        assert stop.signal_name == number.name
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_at_once():
    with GracefulStop(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_other_threads_change_no_handlers():
    seen = []

    def work():
        with GracefulStop():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_alone_a_process_agrees_at_once():
    with GracefulStop() as stop:
        assert stop.agreed() is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.agreed() == "SIGTERM"


def test_of_several_processes_all_stop_a_step_after_the_first_was_told(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with GracefulStop() as stop:
        assert [stop.agreed(), stop.agreed()] == [None, None]
        signal.raise_signal(signal.SIGINT)
        assert [stop.agreed(), stop.agreed()] == [None, "SIGINT"]
