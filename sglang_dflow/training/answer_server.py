"""``Generate`` through a running SGLang server: its native ``/generate`` with token ids in and out.

One request carries a whole batch; the server schedules it. Loops are cut here as the in-process generator cuts them.
Sampled answers differ from run to run: the server draws its own random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import requests

from sglang_dflow.training.generate import Generated, Sampling, cut_loop


class ServerGenerate:
    """Continues prompts with the model that the server at ``url`` serves."""

    def __init__(self, url: str, timeout_s: float = 3600.0) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s

    def model_path(self) -> str:
        """What the server serves, as it was told.

        Raises:
            RuntimeError: no server there.
        """
        return str(self._call("GET", "/model_info", None)["model_path"])

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, seed: int, capture: bool
    ) -> list[Generated]:
        """Continue each prompt, in order; ``seed`` and ``capture`` have no effect on a server.

        Raises:
            RuntimeError: the server is not there, refuses the request, aborts one, or gives no ``output_ids``.
        """
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_p < 1.0 else -1,
            "max_new_tokens": max_new_tokens,
        }
        body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": parameters}
        replies = self._call("POST", "/generate", body)
        if len(replies) != len(prompts):
            raise RuntimeError(f"{self.url} gave {len(replies)} answers to {len(prompts)} prompts")
        return [self._generated(reply) for reply in replies]

    def _generated(self, reply: dict[str, Any]) -> Generated:
        tokens, reason = reply.get("output_ids"), reply["meta_info"]["finish_reason"]
        if tokens is None or reason["type"] not in ("stop", "length"):
            raise RuntimeError(
                f"{self.url} answered with finish reason {reason} and {'no' if tokens is None else 'some'} output_ids; "
                "expected 'stop' or 'length' with ids. Remedy: see the server's log; shorter prompts may help."
            )
        finish = "eos" if reason["type"] == "stop" else "length"
        if isinstance(reason.get("matched"), int) and tokens[-1:] != [reason["matched"]]:
            tokens = [*tokens, reason["matched"]]  # the end token is part of an answer
        return Generated(*cut_loop(tokens, finish), None)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            reply = requests.request(method, self.url + path, json=body, timeout=self.timeout_s)
            reply.raise_for_status()
        except requests.RequestException as error:
            raise RuntimeError(
                f"{self.url}{path} failed: {error}. Expected a running SGLang server that serves the target. Remedy: "
                "start it, or leave out --server to answer in this process."
            ) from error
        return reply.json()
