"""Training prompts: from JSON lines, from a hub data set, or written by the target itself.

Owns the reading of the common layouts, the reproducible mix of sources, the shards, and the guard that keeps
evaluation prompts out. A record is one conversation in one of these layouts (user turns are taken, answers dropped:
the target writes its own):

    {"id", "turns": [..]}   {"prompt": ".."}   {"question": ".."}   {"messages": [{"role", "content"}, ..]}
    {"conversations": [{"from": "human", "value"}, ..]}   (ShareGPT)

A missing id becomes ``<file stem>/<line>``.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflow.training.generate import Generate, Sampling

Log = Callable[[str], None]

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

_LAYOUTS = '"turns", "messages", "conversations", "prompt" or "question"'
_HELD_OUT_WORDS = 8  # texts at least this long are also found inside a longer one


class Prompt(NamedTuple):
    """One request to answer."""

    id: str
    domain: str
    ids: list[int]  # chat template applied, generation prompt included


class Conversation(NamedTuple):
    """A conversation's user side."""

    id: str
    domain: str
    turns: list[str]
    system: str | None = None


class Source(NamedTuple):
    """One ``--prompts`` item."""

    name: str  # path of a JSON-lines file, or OWNER/NAME[@SPLIT[@CONFIG]] on the hub
    limit: int  # 0: all
    domain: str  # empty: the part of the id before its first "/"

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read ``FILE_OR_DATASET[:COUNT[:DOMAIN]]``."""
        name, count, domain = (text.split(":") + ["", ""])[:3]
        if not name or text.count(":") > 2 or not (count == "" or count.isdecimal()):
            raise ValueError(f"--prompts {text!r} is not FILE_OR_DATASET[:COUNT[:DOMAIN]], e.g. train.jsonl:1000:math")
        return cls(name, int(count or 0), domain)


# --- ids of answers ----------------------------------------------------------------------------------------


def answer_id(conversation: str, sample: int, turn: int) -> str:
    """Id of one answer: the conversation's own for its first answer, ``<id>#s<sample>t<turn>`` for the others."""
    return conversation if sample == turn == 0 else f"{conversation}#s{sample}t{turn}"


def conversation_of(answer: str) -> str:
    """Id of the conversation that an answer belongs to."""
    return re.sub(r"#s\d+t\d+$", "", answer)


# --- reading -----------------------------------------------------------------------------------------------


def _user_side(record: Any) -> tuple[list[str], str | None] | None:
    """(user turns, system message) of a record; None if it has no user turn in a known layout."""
    if not isinstance(record, dict):
        return None
    messages = record.get("messages") or record.get("conversations") or record.get("prompt")
    if isinstance(record.get("turns"), list):
        turns, system = list(record["turns"]), None
    elif isinstance(messages, list):
        pairs = [(m.get("role", m.get("from")), m.get("content", m.get("value"))) for m in messages]
        turns = [text for role, text in pairs if role in ("user", "human")]
        system = next((text for role, text in pairs if role == "system" and text), None)
    else:
        turns, system = [record.get("prompt") or record.get("question")], None
    good = bool(turns) and all(isinstance(turn, str) and turn.strip() for turn in turns)
    return (turns, system) if good else None


def read_conversations(path: str | Path, domain: str = "") -> list[Conversation]:
    """Read a JSON-lines file of prompts.

    Raises:
        ValueError: the first line that is no conversation, with what was expected; a repeated id.
    """
    conversations: list[Conversation] = []
    for number, line in enumerate(Path(path).read_text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}); expected one object a line") from error
        side = _user_side(record)
        if side is None:
            raise ValueError(f"{path}:{number}: no user turn; expected text under {_LAYOUTS}")
        name = str(record.get("id") or f"{Path(path).stem}/{number - 1}")
        label = domain or (name.split("/")[0] if "/" in name else Path(path).stem)
        conversations.append(Conversation(name, label, *side))
    return conversations


def read_turns(path: str | Path) -> list[tuple[str, list[str]]]:
    """(id, user turns) of every conversation of a JSON-lines file."""
    return [(conversation.id, conversation.turns) for conversation in read_conversations(path)]


def read_hub(source: Source, rng: random.Random, log: Log) -> list[Conversation]:
    """Read ``source.limit`` random conversations of a hub data set, through the optional ``datasets``.

    Raises:
        RuntimeError: the library is missing, or the hub cannot be reached, or it has no such data set.
        ValueError: none of its records has a known layout.
    """
    repository, split, config = (source.name.split("@") + ["", ""])[:3]
    try:
        import datasets
    except ImportError as error:
        raise RuntimeError(
            f"{source.name!r} is no file here, and reading it as a hub data set needs the library 'datasets'. Remedy: "
            "correct the path, or pip install datasets."
        ) from error
    try:
        table = datasets.load_dataset(repository, config or None, split=split or "train")
    except Exception as error:  # the hub's clients raise their own, unrelated classes
        raise RuntimeError(
            f"{source.name!r} is no file here and could not be loaded from the hub ({type(error).__name__}: {error}). "
            "Remedy: correct the path, or OWNER/NAME[@SPLIT[@CONFIG]], or use a local JSON-lines file."
        ) from error
    order = list(range(len(table)))
    rng.shuffle(order)
    label, wanted = source.domain or repository.split("/")[-1], source.limit or len(order)
    conversations: list[Conversation] = []
    for looked_at, index in enumerate(order):
        if len(conversations) == wanted:
            break
        side = _user_side(table[index])
        if side is not None:
            conversations.append(Conversation(f"{repository}/{index}", label, *side))
        elif looked_at == 99 and not conversations:
            break
    if not conversations:
        raise ValueError(f"{source.name!r}: no user turn in its records; expected text under {_LAYOUTS}")
    log(f"data: {len(conversations)} conversations from {source.name}")
    return conversations


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation with the generation prompt, exactly as a chat server builds them."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# --- evaluation sets stay out ------------------------------------------------------------------------------


def normalised(text: str) -> str:
    """Words and numbers in lower case between single blanks: what two versions of one prompt share."""
    return " " + " ".join(re.findall(r"[^\W_]+", text.casefold())) + " "


class HoldOut:
    """Prompts that must never be trained on."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        texts = {normalised(turn) for path in paths for _, turns in read_turns(path) for turn in turns}
        self._texts = texts
        self._long = [text for text in texts if len(text.split()) >= _HELD_OUT_WORDS]
        self._joined = "\n".join(texts)

    def holds(self, text: str) -> bool:
        """Whether ``text`` is held out: equal after normalisation, or, from 8 words on, one inside the other."""
        own = normalised(text)
        if own in self._texts:
            return True
        if any(held in own for held in self._long):
            return True
        return len(own.split()) >= _HELD_OUT_WORDS and own in self._joined

    def refuse(self, conversations: Iterable[Conversation]) -> None:
        """Raise ``ValueError`` naming the conversations with a held-out turn."""
        bad = [c.id for c in conversations if any(self.holds(turn) for turn in c.turns)]
        if bad:
            raise ValueError(
                f"{len(bad)} prompts occur in the --hold-out files and must not be trained on: {', '.join(bad[:5])}"
                f"{', ...' if len(bad) > 5 else ''}. Remedy: take them out of the --prompts files."
            )


# --- prompts that the target writes ------------------------------------------------------------------------


def write_own_prompts(
    generate: Generate, tokenizer: Any, domain: str, count: int, seed: str, hold_out: HoldOut, batch_rows: int = 96
) -> list[str]:
    """Let the target write ``count`` different user turns itself: sampled behind its own user header.

    Turns that are held out are dropped: a target may know public evaluation sets by heart.

    Raises:
        ValueError: no such domain.
        RuntimeError: the target writes too few usable turns.
    """
    if domain not in SEEDS:
        raise ValueError(f"--self domain {domain!r} is unknown, expected one of {', '.join(SEEDS)}")
    rng = random.Random(f"{domain}/{seed}")
    header = tokenizer.apply_chat_template([{"role": "user", "content": "@@"}], tokenize=False).split("@@")[0]
    sampling = Sampling(temperature=1.0, top_p=0.95)
    limit = 160 if domain == "tested" else 96
    texts: dict[str, str] = {}  # by normalised text
    asked = 0
    while len(texts) < count:
        if asked > 20 * (count + batch_rows):
            raise RuntimeError(
                f"the target wrote only {len(texts)} usable {domain} turns of {asked}, {count} were wanted. Remedy: "
                "ask for fewer (--self), or give prompts (--prompts)."
            )
        starts = [rng.choice(SEEDS[domain]) for _ in range(batch_rows)]
        prompts = [list(tokenizer(header + start, add_special_tokens=False)["input_ids"]) for start in starts]
        asked += batch_rows
        for start, written in zip(starts, generate(prompts, limit, sampling, rng.randrange(2**31), False)):
            text = (start + tokenizer.decode(written.tokens, skip_special_tokens=True)).strip()
            if domain == "tested":
                text = text + "\n```" if text.count("```") == 1 else text
            elif written.finish != "eos":
                continue
            if len(text) >= 12 and written.finish != "loop" and not hold_out.holds(text):
                texts.setdefault(normalised(text), text)
    return list(texts.values())[:count]


# --- the mix -----------------------------------------------------------------------------------------------


class Mix(NamedTuple):
    """What to take from where."""

    sources: Sequence[Source]
    own: dict[str, int]  # domain -> how many turns the target writes itself
    boxed: dict[str, float]  # domain -> share of first turns that ask for a boxed answer
    hold_out: Sequence[str]  # evaluation files
    exclude: Sequence[str]  # ids that are answered elsewhere
    seed: int
    shard: int
    shards: int


def collect(mix: Mix, generate: Generate, tokenizer: Any, log: Log) -> list[Conversation]:
    """The conversations of this shard, shuffled: a prefix of any length is a fair sample of the mix.

    What a source gives, its order and the boxed suffixes depend on the seed alone; shards part by a hash of the id,
    and each writes its share of the target's own prompts.

    Raises:
        ValueError: a held-out prompt, an id that two conversations share, an unknown domain.
    """
    rng, hold_out = random.Random(mix.seed), HoldOut(mix.hold_out)
    picked: list[Conversation] = []
    for source in mix.sources:
        if Path(source.name).is_file():
            found = read_conversations(source.name, source.domain)
            rng.shuffle(found)
            found = found[: source.limit or None]
        elif source.name.endswith((".json", ".jsonl")):
            raise ValueError(f"--prompts {source.name}: no such file")
        else:
            found = read_hub(source, rng, log)
        hold_out.refuse(found)
        picked += found
    picked = [c for c in picked if zlib.crc32(c.id.encode()) % mix.shards == mix.shard]
    for domain, count in mix.own.items():
        share = count // mix.shards + (mix.shard < count % mix.shards)
        log(f"data: the target writes {share} {domain} prompts ...")
        name = f"{mix.seed}" if mix.shards == 1 else f"{mix.seed}-{mix.shard}of{mix.shards}"
        texts = write_own_prompts(generate, tokenizer, domain, share, name, hold_out)
        picked += [Conversation(f"self-{domain}/{name}/{i}", domain, [text]) for i, text in enumerate(texts)]
    repeated = [name for name, number in Counter(c.id for c in picked).items() if number > 1]
    if repeated:
        raise ValueError(
            f"{len(repeated)} ids occur twice in the prompts, e.g. {repeated[0]!r}. Remedy: make them unique."
        )
    excluded = {conversation_of(name) for name in mix.exclude}
    kept = [_boxed(c, mix) for c in picked if c.id not in excluded]
    log(f"data: {len(kept)} conversations, {len(picked) - len(kept)} excluded")
    random.Random(f"order/{mix.seed}").shuffle(kept)
    return kept


def _boxed(conversation: Conversation, mix: Mix) -> Conversation:
    share = mix.boxed.get(conversation.domain, 0.0)
    if random.Random(f"boxed/{mix.seed}/{conversation.id}").random() >= share:
        return conversation
    return conversation._replace(turns=[conversation.turns[0] + BOXED, *conversation.turns[1:]])
