"""Nearest right names, for the errors about wrong ones."""

from collections.abc import Iterable


def similar_names(name: str, candidates: Iterable[str]) -> list[str]:
    """Returns the candidates that a reader may have meant by `name`, the nearest first.

    Args:
        name: the name that was not found.
        candidates: the names that exist.

    >>> similar_names("lerning_rate", ["learning_rate", "weight_decay", "b1"])
    ['learning_rate']
    """
    # Imported here: a program that spells its names right never pays for it.
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
    """Returns the sentence that an error about an unknown name ends with."""
    candidates = sorted(candidates)
    near = similar_names(name, candidates)[:3]
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    if not candidates:
        return "There are none."
    shown = ", ".join(candidates[:12]) + (", …" if len(candidates) > 12 else "")
    return f"There are: {shown}."
