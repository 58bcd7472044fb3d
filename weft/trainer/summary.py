"""Public names of summaries, which are defined next to the layers that make them."""

from weft.hierarchy.summary import AudioSummary, CallbackSummary, ImageSummary, Summary

__all__ = ["AudioSummary", "CallbackSummary", "ImageSummary", "Summary"]
