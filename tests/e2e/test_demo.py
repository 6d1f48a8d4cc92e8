"""The demo command does its job and tells it in its last line; `verify` does, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _last_json(output: str) -> dict[str, object]:
    return json.loads(output.strip().splitlines()[-1])


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_dflow.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_demo() -> None:
    run = _run("demo", "--max-new-tokens", "24")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = _last_json(run.stdout)
    assert report["outputs_equal"] is True
    assert float(str(report["tau_relay_on"])) > 1.0
    assert float(str(report["tau_relay_off"])) > 1.0
    assert 0.0 < float(str(report["relay_hit_rate"])) <= 1.0
    assert set(report["versions"]) == {"sglang-dflow", "sglang", "torch", "transformers"}  # type: ignore[call-overload]
    assert len(run.stdout.splitlines()) < 80, "the demo is one screen"


def test_verify_reports_and_passes(target: Path, drafter: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "turns": ["Count to five."]}\n{"id": "b", "text": "def add(a, b):"}\n')
    arguments = ("--model", str(target), "--drafter", str(drafter), "--prompts", str(prompts))
    run = _run("verify", *arguments, "--concurrency", "1,2", "--max-new-tokens", "16")
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report = _last_json(run.stdout)
    assert (report["requests"], report["mismatches"], report["ties"]) == (4, 0, 0)
    assert set(report["concurrency"]) == {"1", "2"}  # type: ignore[call-overload]


@pytest.mark.parametrize("arguments", [(), ("--model", "m"), ("--url", "u")])
def test_verify_needs_two_arms(arguments: tuple[str, ...]) -> None:
    run = _run("verify", *arguments)
    assert run.returncode == 2
    assert "give either --model and --drafter, or --url and --baseline-url" in run.stderr
