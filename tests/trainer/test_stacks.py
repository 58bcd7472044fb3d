import sys
import threading
import time

from weft.trainer.stacks import beside, print_error, stacks_of_all_threads


def test_what_is_held_up_is_not_waited_for():
    free = threading.Event()
    started = time.monotonic()
    beside(free.wait)
    assert 0.9 < time.monotonic() - started < 10
    free.set()
    said = []
    beside(said.append, "x")
    assert said == ["x"]


def test_errors_are_printed_where_the_process_does_so_if_anywhere(capfd, monkeypatch):
    print_error("frozen")
    assert capfd.readouterr().err == "frozen\n"
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(sys, "stderr", None)
    print_error("nowhere")
    assert capfd.readouterr() == ("", "")


def test_the_stacks_are_those_of_all_threads_and_the_caller():
    free, inside = threading.Event(), threading.Event()

    def waits_here():
        inside.set()
        free.wait()

    thread = threading.Thread(target=waits_here)
    thread.start()
    inside.wait()
    stacks = stacks_of_all_threads()
    free.set()
    thread.join()
    assert "in waits_here" in stacks
    assert "in test_the_stacks_are_those" in stacks.partition("Current thread")[2]
