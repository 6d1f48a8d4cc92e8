"""The entry point that SGLang loads in each of its processes (`sglang.srt.plugins`).

The order is the safety: host pin, draft models, hooks, and the algorithm's name LAST. The host's loader only logs an
exception of a plugin, so whatever fails here leaves DFLOW registered as refused, with the reason; other algorithms
are not touched. `require_registered` is asked again in the worker factory, outside the loader's net.
"""

from __future__ import annotations

import logging

from sglang_dflow.compat import host_problem

logger = logging.getLogger(__name__)

_problem: str | None = "its SGLang plugin was never loaded (is SGLANG_PLUGINS set without 'dflow'?)"


def register() -> None:
    """Register DFLOW with the host; on failure register its refusal."""
    global _problem
    _problem = host_problem()
    if _problem is None:
        try:
            _register_models_and_hooks()
        except Exception as error:
            logger.exception("sglang-dflow could not be loaded")
            _problem = f"{type(error).__name__}: {error}"
    _register_algorithm(_problem)


def require_registered() -> None:
    """Raise RuntimeError unless this process registered DFLOW completely."""
    if _problem is not None:
        raise RuntimeError(f"DFLOW cannot start: {_problem}")


def _register_models_and_hooks() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflow.hooks import HOOKS
    from sglang_dflow.hooks.record import install_all
    from sglang_dflow.serving import draft_model

    for model in draft_model.EntryClass:
        ModelRegistry.models[model.__name__] = model
    install_all(HOOKS)


def _register_algorithm(problem: str | None) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_dflow.algorithm import NAME, DFlowAlgorithm, RefusedAlgorithm

    spec_class: type = DFlowAlgorithm
    if problem is not None:
        spec_class = type("RefusedDFlow", (RefusedAlgorithm,), {"problem": problem})

    def worker_class(server_args: object) -> type:
        require_registered()
        from sglang_dflow.serving.worker import DFlowWorker

        return DFlowWorker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=spec_class)(worker_class)
