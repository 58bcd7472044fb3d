import signal
import threading

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
