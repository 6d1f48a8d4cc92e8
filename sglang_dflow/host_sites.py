"""Every place of SGLang 0.5.23 that asks for DFLASH or a DFlash architecture by name, and what it means for DFLOW.

The host dispatches most of DFLASH through `is_dflash()` / `is_dflash_family()`, which DFLOW answers with yes. The
sites below compare the name instead, so DFLOW does not join their branch. A test scans the installed host and fails
on a site that is missing here, or listed here and gone.

Verdicts: `works` (the branch is not needed, or DFLOW reaches it otherwise), `hooked` (a hook record makes it work),
`refused` (the launch stops; by the host's own message, or by `serving/launch_checks.py`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Verdict(enum.StrEnum):
    """What DFLOW does about a host site that compares the name DFLASH."""

    WORKS = "works"
    HOOKED = "hooked"
    REFUSED = "refused"


class HostSite(NamedTuple):
    """One site.

    Attributes:
        where: `"module under sglang.srt:function"`, `"<module>"` for code outside any function.
        verdict: what DFLOW does about it.
        reason: why, in one sentence.
    """

    where: str
    verdict: Verdict
    reason: str


_WORKS, _HOOKED, _REFUSED = Verdict.WORKS, Verdict.HOOKED, Verdict.REFUSED

HOST_SITES: tuple[HostSite, ...] = (
    HostSite("speculative.spec_info:SpeculativeAlgorithm.is_dflash", _WORKS, "DFlowAlgorithm answers it itself"),
    HostSite(
        "speculative.spec_info:SpeculativeAlgorithm.supports_mixed_chunk",
        _WORKS,
        "DFlowAlgorithm answers it itself",
    ),
    HostSite(
        "speculative.dflash_worker_v2:DFlashWorkerV2.__init__",
        _WORKS,
        "a label in log lines, passed by our base class",
    ),
    HostSite(
        "speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
        _WORKS,
        "our base class passes the enum member to its own draft forward",
    ),
    HostSite(
        "arg_groups.speculative_hook:_handle_dflash",
        _WORKS,
        "a label in messages and the platform's support question; DFlowAlgorithm.handle_server_args calls it",
    ),
    HostSite(
        "arg_groups.speculative_hook:_resolve_dflash_draft_attention_backend.is_supported_backend",
        _WORKS,
        "a label for the platform's draft backend question; reached through _handle_dflash",
    ),
    HostSite(
        "arg_groups.speculative_hook:_resolve_dflash_draft_attention_backend.get_fallback_backend",
        _WORKS,
        "as above, for the platform's default draft backend",
    ),
    HostSite(
        "arg_groups.speculative_hook:handle_speculative_decoding",
        _WORKS,
        "block verification is refused by the host for DFLOW with its own message; the draft window is honoured by "
        "the worker although the host logs that it has no effect",
    ),
    HostSite(
        "speculative.spec_utils:spec_need_hidden_states",
        _WORKS,
        "answers True for DFLOW; the future map then carries a hidden state of width 0, no bytes",
    ),
    HostSite(
        "managers.scheduler_components.metrics_reporter:<module>",
        _WORKS,
        "without the early snapshot the forward-pass metrics count a decode batch after its result was settled",
    ),
    HostSite(
        "arg_groups.model_override_base:_forces_eagle_topk_one",
        _WORKS,
        "Blackwell only: the default attention backend there is flashinfer for DFLOW; others can be named",
    ),
    HostSite(
        "arg_groups.model_overrides.nemotron_h:_nemotron_h_overrides",
        _WORKS,
        "only a default for the draft attention backend; _handle_dflash resolves one for DFLOW",
    ),
    HostSite(
        "speculative.dflash_utils:is_nemotron_35_draft_config",
        _REFUSED,
        "asks for the architecture DFlashDraftModel; drafters of that layout (has_embed_tokens) are refused at launch",
    ),
    HostSite(
        "model_executor.model_runner_components.spec_aux_hidden_state:<module>",
        _REFUSED,
        "asks for the architecture DFlash2DraftModel with a muse_glimmer target, which is refused at launch",
    ),
    HostSite(
        "arg_groups.lora_hook:check_lora_speculative_compatibility",
        _HOOKED,
        "hooks/lora.py: the check is asked about DFLOW as about DFLASH",
    ),
    HostSite(
        "arg_groups.kv_cache_hook:handle_kv4_compatibility",
        _REFUSED,
        "the host refuses native NVFP4 KV for DFLASH and DFLOW",
    ),
    HostSite(
        "arg_groups.kv_cache_hook:handle_unified_memory_pool",
        _REFUSED,
        "the host refuses unified memory with an algorithm it does not name",
    ),
    HostSite(
        "arg_groups.validation_hook:<module>",
        _REFUSED,
        "--enable-return-aux-hidden-states captures without a draft; the host asks for DFLASH by name there",
    ),
    HostSite(
        "arg_groups.attention_hook:handle_linear_attn_backend",
        _REFUSED,
        "--enable-linear-replayssm-spec is refused at launch",
    ),
    HostSite(
        "mem_cache.kv_cache_configurator:KVCacheConfigurator._build_hybrid_req_pool",
        _REFUSED,
        "reached only with --enable-linear-replayssm-spec, which is refused at launch",
    ),
    HostSite(
        "disaggregation.mooncake.conn:MooncakeKVManager._validate_peer_state_layout",
        _WORKS,
        "true only where CP and TP share a group, which the host refuses for DFLOW",
    ),
    HostSite(
        "arg_groups.layernorm_sp_hook:validate_layernorm_sp",
        _REFUSED,
        "the host allows --enable-layernorm-sp for DFLASH by name only",
    ),
    HostSite(
        "arg_groups.cp_tp_group_sharing_hook:resolve_cp_tp_group_sharing",
        _REFUSED,
        "the host allows CP/TP group sharing for DFLASH by name only",
    ),
    HostSite(
        "arg_groups.model_overrides.minimax_m3:_minimax_m3_overrides",
        _REFUSED,
        "the host allows MiniMax M3.1 NVFP4 for DSPARK and DFLASH by name only",
    ),
)
