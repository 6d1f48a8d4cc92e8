"""Requests that DFLOW would not serve losslessly are refused with a 400 and the reason, not served differently.

SGLang 0.5.23 verifies a DFLASH block without frequency, presence and repetition penalties and without
`min_new_tokens` under overlap scheduling (`apply_dflash_verify_logits_adjustments` reads a field of
`SamplingBatchInfo` that no longer exists), and with one penalty row for the whole block otherwise; on CUDA its
sampled verification leaves min-p out. Each gives other tokens than the target alone would.
"""

from __future__ import annotations

from typing import Any

_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Sampling parameter -> the value that asks for nothing."""


def request_problem(sampling_params: Any, *, verifies_min_p: bool) -> str | None:
    """Return why this request cannot be served exactly, or None.

    Args:
        sampling_params: the host's normalised `SamplingParams`.
        verifies_min_p: whether sampled verification applies min-p on this platform.
    """
    neutral = _NEUTRAL if verifies_min_p else _NEUTRAL | {"min_p": 0.0}
    asked = [f"{name}={value}" for name, idle in neutral.items() if (value := getattr(sampling_params, name)) != idle]
    if not asked:
        return None
    return (
        f"DFLOW cannot honour {', '.join(asked)}: SGLang 0.5.23 verifies DFLASH blocks without it, so the output would "
        "differ from the target's own. Leave it out (if it comes from the model's generation_config.json, start the "
        "server with --sampling-defaults openai), or use a server without speculation."
    )
