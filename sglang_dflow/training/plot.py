"""A run's curves: loss by round and tau over the steps, from its ``log.jsonl``, as ``curves.png``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def plot_run(run_dir: Path) -> Path | None:
    """Draw ``run_dir/curves.png``; None where matplotlib (extra ``train``) or the log is missing."""
    log = run_dir / "log.jsonl"
    try:
        import matplotlib
    except ImportError:
        return None
    if not log.is_file():
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record for record in records if "losses" in record]
    held_out = [record for record in records if "held_out" in record]
    figure, (loss, tau) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for number in range(max((len(record["losses"]) for record in steps), default=0)):
        points = [(record["step"], record["losses"][number]) for record in steps if number < len(record["losses"])]
        loss.plot(*zip(*points), label=f"round {number}")
    tau.plot([r["step"] for r in steps], [r["tau"] for r in steps], alpha=0.5, label="training anchors")
    for arm in held_out[0]["held_out"] if held_out else ():
        tau.plot([r["step"] for r in held_out], [r["held_out"][arm] for r in held_out], "o-", label=f"held out, {arm}")
    loss.set(xlabel="step", ylabel="loss per row, nats", title=run_dir.name)
    tau.set(xlabel="step", ylabel="tau, bonus included")
    for axes in (loss, tau):
        axes.legend()
        axes.grid(alpha=0.3)
    path = run_dir / "curves.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
