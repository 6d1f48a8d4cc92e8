"""The report renders, says what the numbers say, and the tables in the committed documents are those of the example."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sglang_dflow.bench import report, summary, tables
from sglang_dflow.bench.agreement import Agreement
from sglang_dflow.bench.cost import ALL_PARTS
from tests.unit.bench_toys import sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results() -> dict[str, Any]:
    parts = sweep()
    return {
        "arms": [{"arm": name, "runs": True, "reason": None} for name in ("no speculation", "DFLASH", "DFLOW")]
        + [{"arm": "EAGLE-3", "runs": False, "reason": "no <head> given"}],
        "points": summary.points(parts),
        "comparisons": summary.comparisons(parts),
        "outputs": Agreement({"DFLOW": "abc"}).record(),
        "settings": {"concurrency": [1, 4], "max_new_tokens": 9, "dtype": "float32", "machine": "a toy"},
        "command": "sglang-dflow bench serving --out x",
    }


@pytest.fixture
def cost() -> dict[str, Any]:
    share = {"median": 0.01, "p10": 0.005, "p90": 0.02}
    stacks = [
        {
            "arm": arm, "concurrency": 1, "rounds": 40, "parts_ms": {part: 1.5 for part in ALL_PARTS},
            "round_ms": {"mean": 1.5 * len(ALL_PARTS)}, "relay_share": share,
        }
        for arm in ("DFLOW relay off", "DFLOW")
    ]  # fmt: skip
    return {"stacks": stacks, "command": "sglang-dflow bench cost"}


def _acceptance(temperature: float) -> dict[str, Any]:
    arm = {"tau": 2.25, "interval": [2.1, 2.4]}
    one = {"relay_off": arm | {"n": 14}, "relay_on": arm | {"n": 14}, "ratio": 1.0, "ratio_interval": [0.9, 1.1]}
    mean = {"relay_off": arm, "relay_on": arm, "ratio": 1.0, "ratio_interval": [0.9, 1.1]}
    return {"temperature": temperature, "sets": {"gsm8k": one}, "mean": mean, "command": "sglang-dflow acceptance"}


class _Balance(HTMLParser):
    """Every element that is opened is closed, in order; collects what would load something from elsewhere."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [
            value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_whole_and_self_contained(results: dict[str, Any], cost: dict[str, Any], tmp_path: Path) -> None:
    """Catches a section dropped, markup broken by a name, a link to elsewhere, and a figure in a fixed colour."""
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "cost.json").write_text(json.dumps(cost))
    files = []
    for temperature in (0.0, 1.0):
        files.append(tmp_path / f"t{temperature:g}.txt")
        files[-1].write_text(f"a table\n{json.dumps(_acceptance(temperature))}\n")
    assert report.main([str(tmp_path), "--acceptance", *map(str, files)]) == 0
    text = (tmp_path / "report.html").read_text()
    parser = _Balance()
    parser.feed(text)
    assert parser.open == [] and parser.loads == []
    for expected in (
        "13.5 (9.0..18.0)",
        "Not run: EAGLE-3 (no <head> given).",
        "2.250 (2.100..2.400)",
        "1.00% (0.50%..2.00%)",
        "4.20",
    ):
        assert expected in parser.text
    assert text.count("<svg") == 6 and "#010203" not in text
    assert {file.name for file in tmp_path.glob("*.png")} == {
        "throughput.png", "gain.png", "depth.png", "tau-T0.png", "tau-T1.png", "cost.png",
    }  # fmt: skip
    ids = re.findall(r'clipPath id="(\w+)"', text)
    assert len(ids) == len(set(ids))  # a figure would be clipped by another's


def test_findings_follow_the_numbers(results: dict[str, Any]) -> None:
    said = " ".join(tables.findings(results))
    assert "are equal" in said and "at least 0.95 of the tau ratio" in said
    assert "faster than no speculation at every concurrency" in said
    for one in results["comparisons"]:
        if one["concurrency"] == 4:
            one["throughput_ratio"]["median"] = 0.9
            one.get("throughput_over_tau", {})["median"] = 0.9
    results["outputs"] |= {"equal": False, "mismatches": 2}
    said = " ".join(tables.findings(results))
    assert (
        "2 mismatches" in said and "less than 0.95 of the tau ratio as throughput over DFLASH at concurrency 4" in said
    )
    assert "not faster than no speculation at concurrency 4" in said


def test_undefined_gain_is_said(results: dict[str, Any]) -> None:
    results["comparisons"][0]["realised_gain"] = None
    assert tables.gains(results).rows[0][-1].startswith("undefined")
    assert tables.gains(results).rows[1][-1] == "1.00 (1.00..1.00)"


def test_marked_blocks_are_rewritten(results: dict[str, Any], cost: dict[str, Any]) -> None:
    """Only what stands between the marks, each with its own table; the same again changes nothing."""
    first, second = "<!-- bench:begin -->\nold\n<!-- bench:end -->", "<!-- bench:begin gains -->\n<!-- bench:end -->"
    text = f"before\n{first}\nbetween\n{second}\nafter\n"
    found = report.with_tables(text, results, cost)
    assert found.startswith("before\n<!-- bench:begin -->\n| output tokens/s | 1 | 4 | tau |\n")
    assert "| DFLOW | 13.5 (9.0..18.0) | 54.0 (36.0..72.0) | 1.800 |" in found and "old" not in found
    assert "a toy" in found and "sglang-dflow bench serving --out x" in found
    assert found.endswith("<!-- bench:end -->\nafter\n") and "realised gain" in found.split("between")[1]
    assert report.with_tables(found, results, cost) == found
    with pytest.raises(ValueError, match="put these lines in"):
        report.with_tables("no marks", results, cost)
    with pytest.raises(ValueError, match="no cost.json"):
        report.with_tables("<!-- bench:begin cost -->\n<!-- bench:end -->", results, None)


def test_tables_in_the_documents_are_those_of_the_example() -> None:
    """`sglang-dflow bench report docs/bench --readme FILE` mends a failure."""
    example = ROOT / "docs" / "bench"
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    marked = [file for file in documents if re.search("^<!-- bench:begin", file.read_text(), re.MULTILINE)]
    assert bool(marked) == (example / "results.json").exists(), (
        "an example report without a table of it, or a table of none"
    )
    for file in marked:
        results = report.last_json(example / "results.json")
        cost = report.last_json(example / "cost.json") if (example / "cost.json").exists() else None
        assert report.with_tables(file.read_text(), results, cost) == file.read_text(), file
