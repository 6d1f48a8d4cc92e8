"""Types of command-line arguments that several commands share."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """An integer of at least 1, for ``argparse``."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
