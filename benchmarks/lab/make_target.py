"""Train the laboratory's target: a small Qwen3 model with its own tokenizer, on corpus.py's documents.

    python -m benchmarks.lab.make_target --minutes 14 --threads 2

Writes ``runs/lab/``: the corpus and the prompts, then ``target/``, a transformers checkpoint with tokenizer and chat
template (``<|begin|>`` prompt ``<|answer|>`` continuation ``<|end|>``). Stops and continues: the corpus and the
tokenizer are made once, and ``checkpoint.pt`` holds model, optimiser and step. At the end it continues held-out
prompts greedily, prints some of them, and reports the share that loops: read them before using the target.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.lab import corpus
from sglang_dflow.training.generate import generate_batch
from sglang_dflow.training.prompts import chat_ids, read_turns
from sglang_dflow.training.target import Target

BEGIN, ANSWER, END, MASK = "<|begin|>", "<|answer|>", "<|end|>", "<|mask|>"  # ids 0..3; MASK is the drafter's
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}" + BEGIN + "{{ m['content'] }}" + ANSWER
    + "{% else %}{{ m['content'] }}" + END + "{% endif %}{% endfor %}"
)  # fmt: skip
FINISHES = ("eos", "length", "loop")
MAX_TOKENS = 512  # of a document in training

Log = Any


def make_tokenizer(documents: Sequence[corpus.Document], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of the documents, as ``transformers`` saves and the server loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, ANSWER, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((document.prompt + document.text for document in documents), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[ANSWER, MASK],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, args: argparse.Namespace) -> Any:
    """The model with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("eager")  # here 7 to 17 % more tokens a CPU second than torch's fused attention
    return model


def encode(documents: Sequence[corpus.Document], tokenizer: Any) -> list[list[int]]:
    """Token ids of whole documents, cut to ``MAX_TOKENS``."""
    texts = [BEGIN + d.prompt + ANSWER + d.text + (END if d.complete else "") for d in documents]
    return [ids[:MAX_TOKENS] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def epoch_batches(lengths: Sequence[int], tokens: int, seed: str) -> Iterator[list[int]]:
    """One epoch's batches of at most ``tokens`` padded tokens, similar lengths together, in random order."""
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    order.sort(key=lambda i: lengths[i] // 16)  # stable: random within a length
    batches: list[list[int]] = [[]]
    for index in order:
        if batches[-1] and lengths[index] // 16 * 16 * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(index)
    rng.shuffle(batches)
    yield from batches


def document_loss(model: Any, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, int]:
    """Summed next-token cross entropy of the documents, and how many tokens were predicted.

    Rows are padded on the right: under a causal mask no real token sees padding, so no mask is needed.
    """
    width = max(map(len, rows))
    device = model.device
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)  # [B, T]
    real = torch.arange(1, width, device=device) < torch.tensor([[len(row)] for row in rows], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[real]  # [N, H]
        logits = model.lm_head(hidden)  # [N, V]
    return F.cross_entropy(logits.float(), ids[:, 1:][real], reduction="sum"), int(real.sum())


class Training:
    """State of a run."""

    def __init__(self, model: Any, documents: list[list[int]], args: argparse.Namespace, log: Log) -> None:
        self.model, self.args, self.log = model, args, log
        self.validation, self.documents = documents[:64], documents[64:]
        self.lengths = list(map(len, self.documents))
        matrices = [p for p in model.parameters() if p.ndim > 1]
        gains = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.per_epoch = sum(1 for _ in epoch_batches(self.lengths, args.micro_tokens, "count"))
        self.step, self.elapsed = 0, 0.0
        self.epoch, self.order = -1, list[list[int]]()

    def _micro_batches(self) -> list[list[int]]:
        """Documents of the next step, in micro-batches: activations of one stay in the cores' caches."""
        parts = max(1, self.args.batch_tokens // self.args.micro_tokens)
        chosen = []
        for turn in range(self.step * parts, (self.step + 1) * parts):
            epoch, index = divmod(turn, self.per_epoch)
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = list(epoch_batches(self.lengths, self.args.micro_tokens, f"{self.args.seed}/{epoch}"))
            chosen.append(self.order[index])
        return chosen

    def progress(self) -> float:
        """Share of the time that is used."""
        return min(self.elapsed / (60 * self.args.minutes), 1.0)

    def train_step(self) -> tuple[float, int]:
        """One optimiser step: (mean loss, tokens)."""
        micro = self._micro_batches()
        tokens = sum(self.lengths[i] - 1 for batch in micro for i in batch)
        total = 0.0
        self.model.zero_grad(set_to_none=True)
        for batch in micro:
            loss, _ = document_loss(self.model, [self.documents[i] for i in batch])
            (loss / tokens).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        factor = min(1.0, (self.step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress())))
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * factor
        self.optimizer.step()
        self.step += 1
        return total / tokens, tokens

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on documents of the target's part that are not trained on."""
        loss, count = 0.0, 0
        for start in range(0, len(self.validation), 8):
            part, tokens = document_loss(self.model, self.validation[start : start + 8])
            loss, count = loss + float(part), count + tokens
        return loss / count

    def run(self, checkpoint: Path) -> None:
        """Train until the time is used, with progress and checkpoints."""
        losses, tokens, mark, saved = list[float](), 0, time.monotonic(), time.monotonic()
        while self.progress() < 1.0:
            started = time.monotonic()
            loss, count = self.train_step()
            losses.append(loss)
            tokens += count
            self.elapsed += time.monotonic() - started
            if self.step % 20 == 0:
                self.log(
                    f"step {self.step} epoch {self.epoch} loss {sum(losses) / len(losses):.3f} "
                    f"{tokens / (time.monotonic() - mark):.0f} tokens/s {self.elapsed / 60:.1f} min"
                )
                losses, tokens, mark = [], 0, time.monotonic()
            if time.monotonic() - saved > 120:
                self.save(checkpoint)
                saved = mark = time.monotonic()
        self.save(checkpoint)

    def save(self, checkpoint: Path) -> None:
        """Write the state, atomically."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial = checkpoint.with_suffix(".part")
        torch.save(state | {"step": self.step, "elapsed": self.elapsed}, partial)
        partial.replace(checkpoint)

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint if there is one."""
        if checkpoint.is_file():
            state = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.elapsed = state["step"], state["elapsed"]
            self.log(f"resumed at step {self.step}, {self.elapsed / 60:.1f} min")


def report(folder: Path, count: int, log: Log) -> dict[str, Any]:
    """Continue ``count`` prompts of every evaluation set greedily: how they end, and two of each to read."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target = Target.load(folder / "target", torch.bfloat16)
    record: dict[str, Any] = {}
    for path in sorted((folder / "eval").glob("*.jsonl")):
        prompts = read_turns(path)[:count]
        ids = [chat_ids(tokenizer, [{"role": "user", "content": turns[0]}]) for _, turns in prompts]
        results = generate_batch(target, ids, 256)
        for (name, turns), result in list(zip(prompts, results))[:2]:
            log(f"--- {name} ({result.finish})\n{turns[0]}\n>>> {tokenizer.decode(result.tokens)}")
        finishes = [result.finish for result in results]
        record[path.stem] = {finish: round(finishes.count(finish) / len(results), 3) for finish in FINISHES}
        record[path.stem] |= {"n": len(results), "tokens": sum(len(r.tokens) for r in results) // len(results)}
    return record


def main(argv: list[str] | None = None) -> int:
    """Make the corpus, the tokenizer and the target; report greedy continuations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lab"))
    parser.add_argument("--answers", type=Path, nargs="*", default=None, help="default: runs/data/answers.*.jsonl")
    parser.add_argument("--smollm2", default="runs/cache/SmolLM2-135M-Instruct-float32", help="their tokenizer")
    parser.add_argument("--prompts", type=Path, default=Path("../shared/data/train/prompts.jsonl"))
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=704)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=14.0, help="of training")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of an optimiser step")
    parser.add_argument("--micro-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continuations", type=int, default=40, help="greedy, of each evaluation set, to report on")
    args = parser.parse_args(argv)
    from transformers import AutoTokenizer

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    torch.set_num_threads(args.threads)
    if not (args.out / "corpus.jsonl").exists():
        answers = args.answers or sorted(Path("runs/data").glob("answers.*.jsonl"))
        documents = corpus.collect(answers, AutoTokenizer.from_pretrained(args.smollm2), args.prompts)
        corpus.write(documents, args.out)
    documents = corpus.read(args.out)
    if not (args.out / "target" / "tokenizer.json").exists():
        make_tokenizer(documents, args.vocab).save_pretrained(args.out / "target")
    tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    model = make_model(tokenizer, args).to(args.device)
    ids = encode(documents, tokenizer)
    log(
        f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters; {len(ids)} documents, "
        f"{sum(map(len, ids)) / 1e6:.2f}M tokens"
    )
    training = Training(model, ids, args, log)
    training.resume(args.out / "checkpoint.pt")
    training.run(args.out / "checkpoint.pt")
    loss = training.validate()
    log(f"validation loss {loss:.3f} nats a token")
    model.to("cpu", torch.bfloat16).save_pretrained(args.out / "target")
    record = {"steps": training.step, "minutes": round(training.elapsed / 60, 2), "seed": args.seed}
    record |= {"validation_loss": round(loss, 4), "sets": report(args.out, args.continuations, log)}
    (args.out / "target.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
