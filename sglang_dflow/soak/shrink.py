"""Delta debugging (Zeller and Hildebrandt, `ddmin`): from a failing list to a small one that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], *, max_tries: int) -> list[T]:
    """Return a sublist, in order, that still failed when it was last tried; `items` itself must fail.

    Tries at most `max_tries` sublists. Without that limit the result is 1-minimal: no single item can go.
    """
    current, parts, tries = list(items), 2, 0
    while len(current) > 1 and tries < max_tries:
        size = -(-len(current) // parts)
        for start in range(0, len(current), size):
            candidate = current[:start] + current[start + size :]
            tries += 1
            if candidate and fails(candidate):
                current, parts = candidate, max(parts - 1, 2)
                break
            if tries >= max_tries:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(current))
    return current
