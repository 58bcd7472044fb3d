"""Shared code of all questions: counting, storing, comparing and displaying."""
