"""The numbers of arXiv 2609.06498v1 that the report stands beside ours. Their hardware, models and drafters differ."""

from __future__ import annotations

TAU = (
    ("Qwen3-1.7B", 0, 3.27, 3.56, 3.93),
    ("Qwen3-4B", 0, 3.08, 3.71, 4.20),
    ("Qwen3-8B", 0, 3.00, 3.66, 4.15),
    ("Qwen3-1.7B", 1, 3.16, 2.99, 3.26),
    ("Qwen3-4B", 1, 2.99, 3.15, 3.54),
    ("Qwen3-8B", 1, 2.86, 3.10, 3.45),
)
"""Target, temperature, mean tau over six sets: EAGLE-3, DFlash, DFlow."""

CONCURRENCY = (1, 2, 4, 8, 16, 32)

THROUGHPUT = {
    "4B, no speculation": (146, 288, 550, 1063, 1804, 2851),
    "4B, EAGLE-3": (234, 420, 759, 1211, 1635, 1943),
    "4B, DFlash": (350, 635, 1125, 1803, 2368, 2673),
    "4B, DFlow": (376, 679, 1217, 1959, 2581, 3209),
    "8B, no speculation": (92, 181, 356, 663, 1070, 1630),
    "8B, EAGLE-3": (170, 311, 545, 930, 1244, 1396),
    "8B, DFlash": (260, 473, 878, 1405, 1835, 1891),
    "8B, DFlow": (283, 509, 944, 1518, 2023, 2198),
}
"""Qwen3 target and method -> output tokens/s on GSM8K in SGLang, by `CONCURRENCY`."""

COST_MS = {"verify": 37.55, "draft": 6.09, "relay": 0.51}
"""Mean milliseconds of a round."""
