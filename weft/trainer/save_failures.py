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

    `save` returns whether the policy required it. A failure for lack of space is passed to
    `report`; others raise a CheckpointSaveError.
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

    `save` returns whether the step is not already saved or being saved. Failures of an earlier step
    or of the first attempt are passed to `report`; the second one raises a CheckpointSaveError.
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
