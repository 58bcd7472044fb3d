"""Functions of Flax that choose whether tracebacks show Weft's internal frames."""

from weft.core.settings import settings


def hide_flax_in_tracebacks() -> None:
    """Hides internal frames, the default: sets the flag `flax_filter_frames`."""
    settings.filter_frames = True


def show_flax_in_tracebacks() -> None:
    """Shows all frames in tracebacks: unsets the flag `flax_filter_frames`."""
    settings.filter_frames = False
