"""Handling of failed saves.

    full disk or quota     reported, training continues, and the next save that is due is the next
                           attempt; earlier checkpoints remain
    any other error        the run fails, at the latest when the next save is due
    at the end of the run  the last step must be saved: one more attempt, then the run fails

A run whose last step is not saved therefore never ends as if it were.
"""

from collections.abc import Callable

from weft.errors import CheckpointSaveError


def save_if_due(save: Callable[[], bool], *, report: Callable[[CheckpointSaveError], None]) -> bool:
    """Saves after a step and returns whether a save has begun.

    Args:
        save: saves if the policy requires it, and returns whether it did.
        report: called with a failure that does not end the run.

    Raises:
        CheckpointSaveError: if a save failed for a reason other than lack of space.
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
    """Saves the last step of a run, waits for it, and returns whether a save was needed.

    Args:
        save: saves unless this step is already saved or being saved; returns whether it does.
        wait: waits for a save in progress.
        report: called with a failure that does not end the run: of an earlier step, or of the
            first attempt.

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
