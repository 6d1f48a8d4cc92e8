"""The operator's switches, read from the environment once at start.

The host's command line cannot be extended by a plugin, so the plugin's few switches are environment variables with
the host's spelling. An unknown value stops the server: a typo must not silently serve the other arm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

_WORDS = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}


def read_switch(variable: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Read one switch; on when it is unset.

    Raises:
        ValueError: the variable holds something else than on/off.
    """
    word = environ.get(variable, "on").strip().lower()
    if word not in _WORDS:
        raise ValueError(f"{variable} is {environ[variable]!r}, expected on or off. Correct or unset it")
    return _WORDS[word]


@dataclass(frozen=True)
class RelaySettings:
    """`SGLANG_DFLOW_RELAY`: `on` (default) or `off`, which drafts exactly as the host's DFLASH does."""

    VARIABLE: ClassVar[str] = "SGLANG_DFLOW_RELAY"

    enabled: bool = True

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RelaySettings:
        """Read the switch.

        Raises:
            ValueError: the variable holds something else than on/off.
        """
        return cls(enabled=read_switch(cls.VARIABLE, environ))
