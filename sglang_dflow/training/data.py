"""Training data: prompts -> the target's own answers, in batched plain torch.

Owns the greedy (or sampled) batch generator, the self-written prompts, the removal of loops and the answer files.
An answers file is JSON lines ``{"id", "domain", "prompt_ids", "answer_ids", "finish"}``; it is only ever appended
to, a line at a time, so an interrupted run resumes by skipping the ids that are already there.

A target that falls into a loop makes its own text trivially predictable and inflates acceptance: an answer is cut
after the first period of a loop (``finish: "loop"``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sglang_dflow.training.target import Target, TargetShape

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TESTED = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"

# Beginnings of user turns that the target completes itself, by domain. An empty one leaves everything to it.
SEEDS: dict[str, list[str]] = {
    "chat": ["", "", "", "", "Write a", "Can you", "Explain", "How do", "What", "Give me", "Describe", "Compose",
             "Imagine you are", "Suggest", "Rewrite", "List", "Why", "Compare", "Summarize", "Edit the following"],
    "code": ["Write a function to", "Write a python function to", "Write a Python function that",
             "Write a function that", "Write a program to", "Implement"],
    "tested": [TESTED + "def ", TESTED + "from typing import List\n\n\ndef ", TESTED + "\ndef "],
    "math": ["Find", "What is", "If $", "Let $", "How many", "Compute", "Solve", "A ", "The ", "Simplify", "Evaluate"],
}  # fmt: skip


class Prompt(NamedTuple):
    """One conversation to answer."""

    id: str
    domain: str
    ids: list[int]  # chat template applied, generation prompt included


class Answer(NamedTuple):
    """The target's own continuation of a prompt."""

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: str  # "eos", "length" or "loop"


class Generated(NamedTuple):
    """One continuation, with the captured states of every row that went through the target."""

    tokens: list[int]
    finish: str
    states: torch.Tensor | None  # [len(prompt) + len(tokens) - 1, m * H]; None unless asked for


class Sampling(NamedTuple):
    """How to pick the next token; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 200  # bounds the sort that top-p needs


# --- loops -----------------------------------------------------------------------------------------------


def loop_start(tokens: Sequence[int], max_period: int = 64, min_repeats: int = 3, min_length: int = 24) -> int | None:
    """Index behind the first period of a loop that reaches the end of ``tokens``, or None.

    A loop is a tail with period ``p``, ``min_repeats`` periods and ``min_length`` tokens long.
    """
    n = len(tokens)
    for period in range(1, min(max_period, n // min_repeats) + 1):
        start = n - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if n - start >= max(min_repeats * period, min_length):
            return start + period
    return None


# --- batched generation ----------------------------------------------------------------------------------


class _Cache:
    """Key/value cache of a left-padded batch; keys are stored transposed.

    [B * Hkv, D, T] is the layout in which a one-row bf16 product reads keys without a transpose: 3x faster here
    than scaled_dot_product_attention with its per-call packing.
    """

    def __init__(self, shape: TargetShape, batch: int, length: int, dtype: torch.dtype) -> None:
        self.shape, self.length = shape, 0
        rows = batch * shape.num_kv_heads
        self.keys = [torch.empty(rows, shape.head_dim, length, dtype=dtype) for _ in range(shape.num_layers)]
        self.values = [torch.empty(rows, length, shape.head_dim, dtype=dtype) for _ in range(shape.num_layers)]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given batch rows [B']."""
        heads = self.shape.num_kv_heads
        flat = (rows[:, None] * heads + torch.arange(heads)).flatten()
        self.keys = [k[flat] for k in self.keys]
        self.values = [v[flat] for v in self.values]


def _prefill_attend(shape: TargetShape, cache: _Cache, left_pad: torch.Tensor) -> Any:
    from sglang_dflow.training.target import causal_attend

    inner = causal_attend(shape, left_pad)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = k.shape[1]
        cache.keys[layer][:, :, :length] = k.permute(0, 2, 3, 1).flatten(0, 1)
        cache.values[layer][:, :length] = v.transpose(1, 2).flatten(0, 1)
        return inner(layer, q, k, v)

    return attend


def _decode_attend(shape: TargetShape, cache: _Cache, bias: torch.Tensor) -> Any:
    """Attention of one new row per sequence; ``bias`` [B, 1, 1, T] hides left padding."""
    groups, end = shape.num_heads // shape.num_kv_heads, cache.length + 1
    scale = shape.head_dim**-0.5

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = cache.keys[layer], cache.values[layer]
        keys[:, :, end - 1] = k.reshape(-1, shape.head_dim)
        values[:, end - 1] = v.reshape(-1, shape.head_dim)
        query = q.reshape(-1, groups, shape.head_dim) * scale  # [B Hkv, groups, D]
        scores = torch.bmm(query, keys[:, :, :end]).view(-1, shape.num_kv_heads, groups, end)
        weights = torch.softmax(scores + bias[..., :end], dim=-1).view(-1, groups, end)
        return torch.bmm(weights, values[:, :end]).view(q.shape[0], 1, -1)  # [B, 1, Hq D]

    return attend


def _pick(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """Next tokens [B] from logits [B, V]."""
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    values, ids = torch.topk(logits.float() / sampling.temperature, sampling.top_k, dim=-1)
    probs = F.softmax(values, dim=-1)
    outside = probs.cumsum(-1) - probs > sampling.top_p
    choice = torch.multinomial(probs.masked_fill(outside, 0.0), 1, generator=generator)  # [B, 1]
    return ids.gather(-1, choice)[:, 0]


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    generator: torch.Generator | None = None,
    cut_loops: bool = True,
    capture: bool = False,
) -> list[Generated]:
    """Continue each prompt to its end token, in order.

    ``capture`` keeps the captured states on the way: generation computes them anyway, so training data comes with
    its features and needs no second pass over the text.
    """
    generator = generator or torch.Generator().manual_seed(0)
    shape, batch, width = target.shape, len(prompts), max(len(p) for p in prompts)
    pad = torch.tensor([width - len(p) for p in prompts])  # [B]
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])  # [B, width]
    cache = _Cache(shape, batch, width + max_new_tokens, target.dtype)
    positions = (torch.arange(width)[None] - pad[:, None]).clamp_min(0)
    hidden, captured = target.forward(ids, positions, _prefill_attend(shape, cache, pad), capture)
    cache.length = width
    states = None
    if captured is not None:
        states = captured.new_empty(batch, width + max_new_tokens, captured.shape[-1])  # [B, T, m * H]
        states[:, :width] = captured
    columns = torch.arange(width + max_new_tokens)
    bias = torch.where(columns[None] < pad[:, None], float("-inf"), 0.0).to(target.dtype)[:, None, None]
    produced: list[list[int]] = [[] for _ in range(batch)]
    finish = [""] * batch  # empty while the answer grows
    rows = torch.arange(batch)  # original index of each batch row still alive
    last = _pick(target.logits(hidden[:, -1]), sampling, generator)  # [B']
    eos = set(target.eos_token_ids)
    for step in range(max_new_tokens):
        alive = []
        for row, (index, token) in enumerate(zip(rows.tolist(), last.tolist())):
            if finish[index]:
                continue  # done, not yet compacted away
            produced[index].append(token)
            if token in eos:
                finish[index] = "eos"
            elif cut_loops and step % 16 == 15 and (start := loop_start(produced[index])) is not None:
                del produced[index][start:]
                finish[index] = "loop"
            else:
                alive.append(row)
        if not alive or step == max_new_tokens - 1:
            break
        # Copying the cache costs about one step, so it waits until a quarter of the rows are done.
        if len(alive) <= 0.75 * len(rows):
            keep = torch.tensor(alive)
            cache.keep(keep)
            rows, last, pad, bias = rows[keep], last[keep], pad[keep], bias[keep]
        attend = _decode_attend(shape, cache, bias)
        hidden, captured = target.forward(last[:, None], (cache.length - pad)[:, None], attend, capture)  # [B', 1, ..]
        if states is not None and captured is not None:
            states[rows, cache.length] = captured[:, 0]
        cache.length += 1
        last = _pick(target.logits(hidden[:, 0]), sampling, generator)
    for index, tokens in enumerate(produced):
        if not finish[index]:
            finish[index] = "length"
            if cut_loops and (start := loop_start(tokens)) is not None:
                del tokens[start:]
                finish[index] = "loop"
    return [
        Generated(
            tokens,
            finish[index],
            None if states is None else states[index, width - len(prompts[index]) : width + len(tokens) - 1],
        )
        for index, tokens in enumerate(produced)
    ]


# --- prompts ---------------------------------------------------------------------------------------------


def read_turns(path: str | Path) -> list[tuple[str, list[str]]]:
    """Read prompts ``{"id", "turns"}``, one JSON object a line."""
    records = [json.loads(line) for line in Path(path).read_text().split("\n") if line.strip()]
    return [(str(record["id"]), list(record["turns"])) for record in records]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation with the generation prompt, exactly as a chat server builds them."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def write_own_prompts(
    target: Target, tokenizer: Any, domain: str, count: int, seed: int, batch_rows: int = 96
) -> list[str]:
    """Let the target write user turns itself: sampled behind its own user header, so no data set is needed."""
    rng = random.Random(f"{domain}/{seed}")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    header = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False).split("@@")[0]
    sampling = Sampling(temperature=1.0, top_p=0.95)
    limit = 160 if domain == "tested" else 96
    texts: list[str] = []
    while len(texts) < count:
        seeds = [rng.choice(SEEDS[domain]) for _ in range(batch_rows)]
        prompts = [list(tokenizer(header + s, add_special_tokens=False)["input_ids"]) for s in seeds]
        for start, (tokens, finish, _) in zip(seeds, generate_batch(target, prompts, limit, sampling, generator)):
            text = (start + tokenizer.decode(tokens, skip_special_tokens=True)).strip()
            if domain == "tested":
                text = text + "\n```" if text.count("```") == 1 else text
            elif finish != "eos":
                continue
            if len(text) >= 12 and finish != "loop":
                texts.append(text + BOXED if domain == "math" else text)
    return texts[:count]


def collect_prompts(
    target: Target, tokenizer: Any, train_file: Path, counts: dict[str, int], seed: int, log: Any
) -> list[Prompt]:
    """The mix of training prompts, shuffled: a prefix of any length is a fair sample of the mix."""
    rng = random.Random(seed)
    by_domain: dict[str, list[tuple[str, str]]] = {"gsm8k": [], "mbpp": []}
    for name, turns in read_turns(train_file):
        by_domain["gsm8k" if name.startswith("gsm8k") else "mbpp"].append((name, turns[0]))
    picked: list[tuple[str, str, str]] = []  # id, domain, text
    for domain, prompts in by_domain.items():
        rng.shuffle(prompts)
        for name, text in prompts[: counts.get(domain, 0)]:
            # The evaluation prompts ask for a boxed answer: most maths prompts do so here, too.
            suffix = BOXED if domain == "gsm8k" and rng.random() < 0.85 else ""
            picked.append((name, domain, text + suffix))
    for domain in SEEDS:
        count = counts.get(domain, 0)
        if count:
            log(f"data: the target writes {count} {domain} prompts ...")
            texts = write_own_prompts(target, tokenizer, domain, count, seed)
            picked += [(f"self-{domain}/{seed}/{i}", domain, text) for i, text in enumerate(texts)]
    rng.shuffle(picked)
    return [
        Prompt(name, domain, chat_ids(tokenizer, [{"role": "user", "content": text}])) for name, domain, text in picked
    ]


# --- answer files ----------------------------------------------------------------------------------------


def read_answers(paths: Sequence[str | Path]) -> list[Answer]:
    """Read answer files; a torn last line of an interrupted run is ignored."""
    answers = []
    for path in paths:
        for line in Path(path).read_text().split("\n"):
            try:
                answers.append(Answer(**json.loads(line)))
            except json.JSONDecodeError:
                continue
    return answers


def states_file(answers_path: str | Path) -> Path:
    """The raw bf16 captured states [rows, m * H] beside an answers file, in the order of its lines."""
    return Path(answers_path).with_suffix(".states.bin")


def state_rows(answer: Answer) -> int:
    """Rows of an answer in the states file: every token but the last, whose state nothing reads."""
    return len(answer.prompt_ids) + len(answer.answer_ids) - 1


def answer_prompts(
    target: Target,
    prompts: Sequence[Prompt],
    path: Path,
    max_new_tokens: int,
    batch_rows: int,
    deadline: float,
    log: Any,
) -> None:
    """Answer greedily and append to ``path``; skips answered ids, stops at ``deadline`` (``time.monotonic``)."""
    answered = read_answers([path]) if path.exists() else []
    done = {answer.id for answer in answered}
    todo = [prompt for prompt in prompts if prompt.id not in done]
    log(f"data: {len(todo)} of {len(prompts)} prompts to answer")
    started, tokens_done = time.monotonic(), 0
    states_path = states_file(path)
    states_path.touch()
    with path.open("a") as out, states_path.open("r+b") as states_out:
        # States are written before their line: whatever lies behind the last line's rows is a torn batch.
        row_bytes = 2 * target.shape.hidden_size * len(target.target_layer_ids)
        states_out.truncate(sum(map(state_rows, answered)) * row_bytes)
        states_out.seek(0, 2)
        for batch in _length_sorted(todo, batch_rows):
            if time.monotonic() > deadline:
                log("data: time budget reached")
                return
            results = generate_batch(target, [prompt.ids for prompt in batch], max_new_tokens, capture=True)
            for _, _, states in results:
                assert states is not None
                states_out.write(states.contiguous().view(torch.uint8).numpy().data)
            states_out.flush()
            for prompt, (tokens, finish, _) in zip(batch, results):
                answer = Answer(prompt.id, prompt.domain, prompt.ids, tokens, finish)
                out.write(json.dumps(answer._asdict()) + "\n")
                tokens_done += len(tokens)
            out.flush()
            rate = tokens_done / (time.monotonic() - started)
            log(f"data: {tokens_done} tokens, {rate:.0f} tokens/s, last batch width {max(len(p.ids) for p in batch)}")


def _length_sorted(prompts: Sequence[Prompt], batch_rows: int, window: int = 4) -> Iterator[list[Prompt]]:
    """Batches of similar prompt length, taken from windows so that early batches already mix the domains."""
    for start in range(0, len(prompts), window * batch_rows):
        chunk = sorted(prompts[start : start + window * batch_rows], key=lambda prompt: len(prompt.ids))
        for offset in range(0, len(chunk), batch_rows):
            yield chunk[offset : offset + batch_rows]


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow prepare-data``: prompts -> the target's own greedy answers."""
    parser = argparse.ArgumentParser(prog="sglang-dflow prepare-data", description=main.__doc__)
    parser.add_argument("--target", required=True, help="Hugging Face directory of the target")
    parser.add_argument("--prompts", type=Path, required=True, help='JSON lines {"id", "turns"}')
    parser.add_argument("--out", type=Path, required=True, help="answers file, appended to")
    parser.add_argument("--target-layer-ids", default="1,8,15,22,28", help="captured layers, stored with the answers")
    parser.add_argument("--counts", default="gsm8k=1100,mbpp=450,chat=800,code=300,tested=200,math=350")
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--batch-rows", type=int, default=96)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop starting batches after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="i/n: this process answers every n-th prompt from i")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    deadline = time.monotonic() + 60 * args.minutes
    from transformers import AutoTokenizer

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    shard, shards = (int(part) for part in args.shard.split("/"))
    layer_ids = [int(part) for part in args.target_layer_ids.split(",")]
    target = Target.load(args.target, torch.bfloat16, layer_ids)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    counts = {k: int(v) for k, v in (item.split("=") for item in args.counts.split(","))}
    # Each shard writes its own share of the self-written prompts (own seed); file prompts are split by index.
    own = {k: (v if k in ("gsm8k", "mbpp") else v // shards) for k, v in counts.items()}
    prompt_file = args.out.with_suffix(".prompts.json")
    if prompt_file.exists():
        prompts = [Prompt(**record) for record in json.loads(prompt_file.read_text())]
    else:
        prompts = collect_prompts(target, tokenizer, args.prompts, own, args.seed + shard, log)
        if shards > 1:
            prompts = _shard(prompts, shard, shards)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        prompt_file.write_text(json.dumps([prompt._asdict() for prompt in prompts]))
    row_bytes = 2 * target.shape.hidden_size * len(layer_ids)
    most = sum(len(prompt.ids) + args.max_new_tokens for prompt in prompts) * row_bytes
    log(f"data: captured states go to {states_file(args.out)}, at most {most / 1e9:.1f} GB")
    answer_prompts(target, prompts, args.out, args.max_new_tokens, args.batch_rows, deadline, log)
    return 0


def _shard(prompts: Sequence[Prompt], shard: int, shards: int) -> list[Prompt]:
    """Split file prompts between shards by a hash of their id, independent of each shard's own order."""
    import zlib

    return [p for p in prompts if p.id.startswith("self-") or zlib.crc32(p.id.encode()) % shards == shard]


if __name__ == "__main__":
    raise SystemExit(main())
