"""Suggestions for misspelled names."""

from collections.abc import Iterable


def similar_names(name: str, candidates: Iterable[str]) -> list[str]:
    """Returns the candidates that are similar to `name`, the nearest first.

    >>> similar_names("lerning_rate", ["learning_rate", "weight_decay", "b1"])
    ['learning_rate']
    """
    # Local: only needed after a misspelling.
    from difflib import SequenceMatcher

    def likeness(candidate: str) -> float:
        wrong, right = name.lower(), candidate.lower()
        ratio = SequenceMatcher(None, wrong, right).ratio()
        contained = len(wrong) > 2 and len(right) > 2 and (wrong in right or right in wrong)
        return max(ratio, 0.65) if contained else ratio

    scores = {candidate: likeness(candidate) for candidate in candidates}
    near = [candidate for candidate, score in scores.items() if score >= 0.6]
    return sorted(near, key=lambda candidate: (-scores[candidate], candidate))


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Returns the last sentence of an error about an unknown name."""
    candidates = sorted(candidates)
    near = similar_names(name, candidates)[:3]
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    if not candidates:
        return "There are none."
    shown = ", ".join(candidates[:12]) + (", …" if len(candidates) > 12 else "")
    return f"There are: {shown}."
