"""The arms of the exactness tests: one real server each, started once, one at a time in a worker.

A server takes a core, seconds to start and 4 to 6 GB: an arm is started when a test first asks for it, does everything
its file wants of it, and is stopped; its results are kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.server import Server, ServerSpec
from sglang_dflow.verify import Completion, generate_all

PROBE = Path(__file__).parent / "probe"
POOL_ARGS = ("--max-total-tokens", "24576", "--sleep-on-idle")
"""Of the test servers: a KV pool for every batch here without retraction, gentle to a small machine; a scheduler that
leaves its core to the test while nobody asks. `test_demo.py` and `test_lives.py` start servers without these."""


class Round(NamedTuple):
    """One verified block of one request."""

    prefix_len: int
    proposals: tuple[int, ...]
    accept_len: int


class ArmResult(NamedTuple):
    """What an arm did.

    Attributes:
        outputs: concurrency -> answers, in the order of the prompts.
        rounds: every verified block, those of `ask` included, in the order of verification (traced arms only).
        extra: whatever `ask` returned.
        log: what the server logged.
    """

    outputs: dict[int, list[Completion]]
    rounds: list[Round]
    extra: Any
    log: str


@dataclass(frozen=True)
class Arm:
    """How to run one arm.

    Attributes:
        drafter: None for no speculation.
        concurrency: concurrency -> how many of the prompts.
        probe: what the probe plugin does in this server, see `probe/dflow_probe.py`.
        ask: asked of the running server after the outputs.
    """

    drafter: Path | None = None
    algorithm: str = "DFLOW"
    concurrency: dict[int, int] = field(default_factory=dict)
    max_new_tokens: int = 32
    extra_args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    ask: Callable[[Server], Any] = lambda server: None

    def run(self, target: Path, prompts_ids: Sequence[Sequence[int]], directory: Path) -> ArmResult:
        """Start the server, collect, stop."""
        spec = ServerSpec(
            model=str(target),
            drafter=None if self.drafter is None else str(self.drafter),
            algorithm=self.algorithm,
            dtype="float32",
            extra_args=(*POOL_ARGS, *self.extra_args),
            env={**self.env, **self.probe_env()},
        )
        directory.mkdir(parents=True, exist_ok=True)
        with Server(spec, log_path=directory / "server.log") as server:
            if "trace" in self.probe:  # the host's own warm-up requests are not ours
                Path(self.probe["trace"]).write_text("")
            outputs = {
                level: generate_all(
                    server.url, prompts_ids[:count], concurrency=level, max_new_tokens=self.max_new_tokens
                )
                for level, count in self.concurrency.items()
            }
            extra = self.ask(server)
        rounds = read_trace(Path(self.probe["trace"])) if "trace" in self.probe else []
        return ArmResult(outputs=outputs, rounds=rounds, extra=extra, log=server.log_text())

    def probe_env(self) -> dict[str, str]:
        """Environment that makes a server load the probe plugin; empty without one."""
        if not self.probe:
            return {}
        path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH", ""))))
        return {"PYTHONPATH": path, "DFLOW_PROBE": json.dumps(self.probe)}


def assert_equal_outputs(expected: ArmResult, found: ArmResult) -> None:
    """The same token ids at every concurrency of `found`, for as many of the prompts as it answered."""
    for level, answers in found.outputs.items():
        pairs = zip(expected.outputs[level][: len(answers)], answers, strict=True)
        differing = [i for i, (a, b) in enumerate(pairs) if a.output_ids != b.output_ids]
        assert differing == [], f"prompts that differ at concurrency {level}"


def read_trace(path: Path) -> list[Round]:
    """Read a probe's trace."""
    rounds = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        for prefix_len, proposals, accept_len in zip(
            entry["prefix_lens"], entry["proposals"], entry["accept_lens"], strict=True
        ):
            rounds.append(Round(prefix_len, tuple(proposals), accept_len))
    return rounds
