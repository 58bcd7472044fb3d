"""What a save that failed means for the run.

    a disk or a quota is full    it is reported, training goes on, and the save that is due next is
                                 the next try; what was saved before stands
    anything else                the run fails, when the next save is due at the latest
    at the end of the run        the last step has to be saved; one more try, then the run fails

So a run whose end is not saved never ends as if it were.
"""

from collections.abc import Callable

from weft.errors import CheckpointSaveError


def save_if_due(save: Callable[[], bool], *, report: Callable[[CheckpointSaveError], None]) -> bool:
    """Saves after a step.

    Args:
        save: saves if the policy says so, and says whether it did.
        report: is told of a failure that does not end the run.

    Returns:
        Whether a save has begun.

    Raises:
        CheckpointSaveError: if a save has failed, and not for lack of room.
    """
    try:
        return save()
    except CheckpointSaveError as error:
        if not error.lacks_room:
            raise
        report(error)
        return False


def save_at_end(
    save: Callable[[], bool],
    wait: Callable[[], None],
    *,
    report: Callable[[CheckpointSaveError], None],
) -> bool:
    """Saves the last step of a run, and waits until it is saved.

    Args:
        save: saves unless this step is saved, or being saved, already; says whether it does.
        wait: waits for what is being saved.
        report: is told of a failure that does not end the run: of an earlier step, or of the first
            try.

    Returns:
        Whether a save was needed.

    Raises:
        CheckpointSaveError: if the last step could not be saved.
    """

    def save_and_wait() -> bool:
        saved = save()
        wait()
        return saved

    try:
        return save_and_wait()
    except CheckpointSaveError as error:
        if not error.lacks_room:
            raise
        report(error)
    return save_and_wait()
