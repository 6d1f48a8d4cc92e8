"""The server's half of the parity tests, a program of its own: `python -m tests.support.served_drafter DIRECTORY`.

For every case in the directory it loads the checkpoint by the host's loader into the host's draft model on the CPU
platform (hooks, packed linears and torch attention included), and plays one round with the worker's own methods:
append a context to the draft KV, accept a verified block (which fills the relay pool), draft the next block. No target
runs here; its embedding and head, the captured states and the verified blocks come from the test.

A case is `NAME/drafter/` (checkpoint) and `NAME/inputs.safetensors`:

    captured [T, m*H]   states of the sequence
    prefix_len [A]      P of every verified block          proposals [A, B]    anchor and drafts
    accept_len [A]      a                                  states [A, B, m*H]  of the verified rows
    tokens [A, B]       true tokens at P' .. P'+B-1        stale [A, B]        the target's top-1 at the verified rows
    embedding, head [V, H]

It leaves `NAME/served.safetensors`: `logits` [A, B-1, V] of the next block's proposals given the true tokens before
them, `argmax` of those, the host's own `proposals` [A, B-1], and `relayed` [A, B], the rows that took a relay. In fp32
also the draft's `hidden` [A, B, H], and the same `replayed` from a graph that was captured before the verification.
"""

from __future__ import annotations

import os

os.environ["SGLANG_PLATFORM"] = "dflow_cpu"  # before anything of the host is imported

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from sglang_dflow.server import reserve_port

CHUNK = 64
"""Requests of one draft forward."""


def start_host() -> None:
    """What a scheduler process has when it builds its draft worker, for one rank without a target."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_context

    load_plugins()
    get_context().override_server_args(device="cpu").install()
    with reserve_port() as keeper:
        address = f"tcp://127.0.0.1:{keeper.getsockname()[1]}"
        init_distributed_environment(1, 0, distributed_init_method=address, local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")


def load_draft_model(directory: Path, dtype: torch.dtype) -> Any:
    """The served draft model, by the host's loader and the platform's own post-processing."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.platforms import current_platform

    config = ModelConfig(str(directory), dtype=str(dtype).removeprefix("torch."), is_draft_model=True)
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    current_platform.post_load_model(model)
    return model


class Round:
    """One draft worker with all requests of a case between its verified block and its next draft."""

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        from sglang_dflow.cpu.attention import TorchAttentionBackend
        from sglang_dflow.cpu.kv_pool import TorchMHATokenToKVPool

        self.model, self.inputs = model, inputs
        self.dtype: torch.dtype = inputs["captured"].dtype
        self.count, self.block = inputs["proposals"].shape
        self.prefix, context = inputs["prefix_len"], inputs["captured"].shape[0]
        attention = model.layers[0].self_attn
        # Slots 1..T hold the sequence's context, shared as the radix cache shares it; behind it 2 * B own slots each.
        own = 1 + context + torch.arange(self.count * 2 * self.block).view(self.count, -1)  # [A, 2 * B]
        table = torch.zeros(self.count + 1, context + 2 * self.block, dtype=torch.int32)
        for row, start in enumerate(self.prefix.tolist()):
            table[row + 1, :start] = 1 + torch.arange(start)
            table[row + 1, start : start + 2 * self.block] = own[row]
        self.slots, self.own = torch.arange(self.count) + 1, own
        self.kv = TorchMHATokenToKVPool(
            size=1 + context + own.numel(),
            page_size=1,
            dtype=self.dtype,
            head_num=attention.num_kv_heads,
            head_dim=attention.head_dim,
            layer_num=len(model.layers),
            device="cpu",
            enable_memory_saver=False,
            enable_kv_cache_copy=False,
        )
        runner: Any = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=self.kv, is_hybrid_swa=False
        )
        self.backend = TorchAttentionBackend(runner)
        self.runner = SimpleNamespace(model=model, attn_backend=self.backend)
        self.embed = torch.nn.Embedding.from_pretrained(inputs["embedding"])
        self.worker = self._worker()

    def _worker(self) -> Any:
        """The worker that serves this architecture, with what its per-round methods read and no target."""
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

        from sglang_dflow.serving.draft_model import RelayMixin
        from sglang_dflow.serving.worker import DFlowWorker

        relay = isinstance(self.model, RelayMixin)
        worker: Any = (DFlowWorker if relay else DFlashWorkerV2).__new__(DFlowWorker if relay else DFlashWorkerV2)
        target = SimpleNamespace(get_input_embeddings=lambda: self.embed)
        runner = SimpleNamespace(device=torch.device("cpu"), model=target)
        worker._target_worker = SimpleNamespace(model_runner=runner)
        worker.model_runner, worker.device = runner, runner.device
        worker.draft_model, worker.block_size = self.model, self.block
        worker.draft_model_runner = SimpleNamespace(token_to_kv_pool=self.kv, dtype=self.dtype)
        worker.draft_parallel_layout = SimpleNamespace(tp_group=None)
        worker.lilicorr, worker._use_fused_kv_materialize = None, False
        worker._full_embed_gpu, worker._noise_embed_scale = None, 1.0
        if relay:
            worker._accepted, worker._req_pool_indices = None, self.slots
            worker._attach_pool(num_rows=self.count + 1)
        return worker

    def verify(self) -> None:
        """Append the context, accept the block, append its committed rows and relay the rejected ones."""
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

        inputs, worker = self.inputs, self.worker
        positions = torch.arange(inputs["captured"].shape[0])
        worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=inputs["captured"], cache_loc=positions + 1, positions=positions
        )
        accept_len = inputs["accept_len"].to(torch.int32)
        decided = (accept_len, accept_len + 1, inputs["tokens"][:, 0], None, None)
        host_accept = DFlashWorkerV2._accept_block
        DFlashWorkerV2._accept_block = lambda *args, **kwargs: decided
        try:
            worker._accept_block(
                candidates=inputs["proposals"], prefix_lens=self.prefix, target_predict=inputs["stale"].flatten()
            )
        finally:
            DFlashWorkerV2._accept_block = host_accept
        cache_loc = self.own[:, : self.block]  # [A, B]
        worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=inputs["states"].flatten(0, 1),
            cache_loc=cache_loc.flatten(),
            positions=(self.prefix[:, None] + torch.arange(self.block)).flatten(),
            cache_loc_2d=cache_loc,
            commit_lens=accept_len + 1,
        )

    def draft(self, mask_token_id: int, graph: Any = None) -> torch.Tensor:
        """Hidden states [A, B, H] of the next block, eagerly or by replay of a `DraftGraphRunner`."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        parts = []
        for rows in torch.arange(self.count).split(CHUNK):
            accept = self.inputs["accept_len"][rows]
            start = self.prefix[rows] + accept + 1  # [n] P'
            offsets = torch.arange(self.block)
            positions = (start[:, None] + offsets).flatten()
            ids = torch.full((len(rows), self.block), mask_token_id)
            ids[:, 0] = self.inputs["tokens"][rows, 0]
            batch: Any = SimpleNamespace(
                input_ids=ids.flatten(),
                positions=positions,
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(rows),
                req_pool_indices=self.slots[rows],
                seq_lens=start,
                spec_info=SimpleNamespace(draft_token_num=self.block),
                out_cache_loc=self.own[rows].gather(1, (accept + 1)[:, None] + offsets).flatten(),
                out_cache_loc_is_physical=True,
            )
            embeds = self.embed(ids.flatten())
            with forward_context(ForwardContext(attn_backend=self.backend)):
                if graph is not None:
                    out = graph.execute(batch, input_embeds=embeds)
                else:
                    self.backend.init_forward_metadata(batch)
                    out = self.model.forward(ids.flatten(), positions, batch, embeds)
            parts.append(out.hidden_states.view(len(rows), self.block, -1))
        return torch.cat(parts)

    def rescored(self, hidden: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The drafts [A, B - 1] that the worker would verify, from states [A, B, H], by its own two ways."""
        from sglang_dflow.serving.rescore import RescoringSampler

        worker = self.worker
        if getattr(getattr(self.model, "relay", None), "relay_rescore", None) is None:
            return drafts
        worker.model_runner.model.lm_head = SimpleNamespace(weight=self.inputs["head"])
        rescore = worker._make_rescorer()
        eager = rescore(self.slots, hidden[:, 1:].flatten(0, 1))
        folded = RescoringSampler(torch.empty_like(drafts.flatten()), rescore, lambda: self.slots)
        folded(hidden.flatten(0, 1))
        assert torch.equal(folded.out, eager)
        return eager.view(drafts.shape)

    def relayed(self) -> torch.Tensor:
        """Rows [A, B] that the pool serves to the next block, by the pool's own reading."""
        mask = torch.zeros(self.count, self.block, dtype=torch.bool)
        pool = getattr(self.worker, "_pool", None)
        if pool is not None:
            start = self.prefix + self.inputs["accept_len"] + 1
            mask[:, pool.rule.first_row :] = pool.read(self.slots, start[:, None] + torch.arange(self.block)).mask
        return mask


def teacher_forced_logits(model: Any, hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [A, B-1, V] of every proposal, with the host's modules; base logits alone without a Domino head."""
    is_domino = model.projector_type == "domino"
    rows = hidden[:, :-1] if is_domino and model.shift_label else hidden[:, 1:]
    logits = F.linear(rows.flatten(0, 1), inputs["head"]).view(*rows.shape[:2], -1)
    if is_domino:
        prefix = F.embedding(inputs["tokens"][:, :-1], inputs["embedding"])  # [A, B-1, H]
        for index in range(1, rows.shape[1]):
            _, state = model.prefix_gru(prefix[:, : index + 1])
            logits[:, index] += model.embed_proj(torch.cat([rows[:, index], state[0]], dim=-1))
    return logits


def host_proposals(model: Any, hidden: torch.Tensor, inputs: dict[str, torch.Tensor], embed: Any) -> torch.Tensor:
    """Greedy proposals [A, B-1]: the host's rollout for Domino (all candidates), else top-1 of the mask rows."""
    from sglang.srt.speculative import dflash_worker_v2

    if model.projector_type != "domino":
        return F.linear(hidden[:, 1:].flatten(0, 1), inputs["head"]).argmax(-1).view(len(hidden), -1)
    lm_head = SimpleNamespace(weight=inputs["head"])
    dflash_worker_v2.validate_domino_runtime(
        device=torch.device("cpu"), tp_size=1, tp_rank=0, target_vocab_size=len(inputs["head"]),
        draft_vocab_size=int(model.config.vocab_size), hidden_size=hidden.shape[-1], target_embedding=embed,
        lm_head=lm_head, prefix_gru=model.prefix_gru, embed_proj=model.embed_proj,
    )  # fmt: skip
    return dflash_worker_v2.domino_greedy_rollout(
        draft_hidden=hidden, bonus_tokens=inputs["tokens"][:, 0], target_embedding=embed,
        lm_head_weight=lm_head.weight, prefix_gru=model.prefix_gru, embed_proj=model.embed_proj,
        vocab_size=len(inputs["head"]), shift_label=bool(model.shift_label), candidate_pool_size=0,
        in_cuda_graph=False,
    )  # fmt: skip


@torch.no_grad()
def serve(case: Path) -> None:
    """Play one case."""
    from sglang_dflow.cpu.graph_runner import DraftGraphRunner

    inputs = load_file(case / "inputs.safetensors")
    config = json.loads((case / "drafter" / "config.json").read_text())
    model = load_draft_model(case / "drafter", inputs["captured"].dtype)
    mask_token_id = config["dflash_config"]["mask_token_id"]
    played = Round(model, inputs)
    graph: Any = None
    if played.dtype == torch.float32:
        graph = DraftGraphRunner(played.runner, max_batch_size=CHUNK)
        played.draft(mask_token_id, graph)  # captured while the relay pool is empty
    played.verify()
    hidden = played.draft(mask_token_id)
    logits = teacher_forced_logits(model, hidden, inputs)
    proposals = host_proposals(model, hidden, inputs, played.embed)
    served = {
        "argmax": logits.argmax(-1),
        "proposals": played.rescored(hidden, proposals),
        "relayed": played.relayed(),
    }
    if logits.dtype == torch.float32:
        served["logits"] = logits
        served["hidden"], served["replayed"] = hidden, played.draft(mask_token_id, graph)
    save_file({name: tensor.contiguous() for name, tensor in served.items()}, case / "served.safetensors")


def main(directory: Path) -> None:
    """Serve every case of the directory."""
    start_host()
    for inputs in sorted(directory.glob("*/inputs.safetensors")):
        serve(inputs.parent)
        print(f"served {inputs.parent.name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
