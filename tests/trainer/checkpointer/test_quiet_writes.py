import asyncio
import threading

import pytest

from weft.trainer.checkpointer.quiet_writes import WriteLoop, write_loops


def test_other_writes_end_before_the_loop_and_their_errors_are_dropped(caplog):
    ended = []

    async def late(fails):
        await asyncio.sleep(0.01)
        ended.append(fails)
        if fails:
            raise OSError("late")

    async def first():
        tasks.extend(asyncio.get_running_loop().create_task(late(x)) for x in (True, False))
        raise OSError("full")

    tasks = []
    with write_loops():
        loop = asyncio.new_event_loop()
    with pytest.raises(OSError, match="full"):
        loop.run_until_complete(first())
    loop.close()
    tasks.clear()
    assert sorted(ended) == [False, True] and caplog.text == ""
    assert loop.call_soon_threadsafe(print, "the result of a write") is None


def test_loops_outside_of_contexts_are_as_before():
    before = asyncio.get_event_loop_policy()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with write_loops():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with write_loops():
        thread.start()
        entered.wait()
    with asyncio.Runner() as runner:  # as long as the other context is open
        assert isinstance(runner.get_loop(), WriteLoop)
    leave.set()
    thread.join()
    assert asyncio.get_event_loop_policy() is before
    with asyncio.Runner() as runner:
        assert not isinstance(runner.get_loop(), WriteLoop)
