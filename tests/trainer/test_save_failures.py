import pytest

from weft.errors import CheckpointSaveError
from weft.trainer.save_failures import save_at_end, save_if_due

FULL = CheckpointSaveError("full", lacks_room=True)
BROKEN = CheckpointSaveError("broken")


class Calls:
    """Does one thing after the other: raises an error, or returns a value."""

    def __init__(self, *does):
        self.does = list(does)

    def __call__(self):
        does = self.does.pop(0)
        if isinstance(does, Exception):
            raise does
        return does


def test_a_full_disk_is_reported_and_the_run_goes_on():
    told = []
    assert save_if_due(Calls(True), report=told.append)
    assert not save_if_due(Calls(False), report=told.append)
    assert told == []
    assert not save_if_due(Calls(FULL), report=told.append)
    assert told == [FULL]
    with pytest.raises(CheckpointSaveError, match="broken"):
        save_if_due(Calls(BROKEN), report=told.append)


@pytest.mark.parametrize(
    ("saves", "waits", "saved", "reported"),
    [
        ([True], [None], True, 0),
        ([False], [None], False, 0),
        ([FULL, False], [None], False, 1),  # an earlier one had failed, the last has begun
        ([False, True], [FULL, None], True, 1),  # the last one itself failed, and is tried again
        ([True, FULL], [FULL], None, 1),
        ([BROKEN], [], None, 0),
        ([True], [BROKEN], None, 0),
    ],
)
def test_the_last_step_is_saved_or_the_run_fails(saves, waits, saved, reported):
    told = []
    if saved is None:
        with pytest.raises(CheckpointSaveError, match=r"full|broken"):
            save_at_end(Calls(*saves), Calls(*waits), report=told.append)
    else:
        assert save_at_end(Calls(*saves), Calls(*waits), report=told.append) is saved
    assert len(told) == reported
