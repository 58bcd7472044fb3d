"""Summaries, as the trainer's users import them; they stand with the layers that make them."""

from weft.hierarchy.summary import AudioSummary, CallbackSummary, ImageSummary, Summary

__all__ = ["AudioSummary", "CallbackSummary", "ImageSummary", "Summary"]
