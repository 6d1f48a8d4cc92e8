"""serving/settings.py: the switch is read as written, or the server stops."""

from __future__ import annotations

import pytest

from sglang_dflow.serving.settings import RelaySettings


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [({}, True), ({"SGLANG_DFLOW_RELAY": "on"}, True), ({"SGLANG_DFLOW_RELAY": " OFF "}, False)],
)
def test_reads_the_switch(environ: dict[str, str], enabled: bool) -> None:
    assert RelaySettings.from_env(environ).enabled is enabled


@pytest.mark.parametrize("word", ["", "maybe", "2"])
def test_an_unknown_word_stops(word: str) -> None:
    """A typo must not silently serve the other arm."""
    with pytest.raises(ValueError, match="expected on or off"):
        RelaySettings.from_env({"SGLANG_DFLOW_RELAY": word})
