"""The base of all errors."""


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""
