"""A toy target, drafter and conversations for the training tests (float32, random weights, milliseconds)."""

from __future__ import annotations

import torch

from sglang_dflow.training.dataset import Sample
from sglang_dflow.training.drafter import Drafter, DrafterConfig
from sglang_dflow.training.target import LayerWeights, Target, TargetShape, causal_attend

SHAPE = TargetShape(16, 24, 4, 4, 2, 4, 40, 1e-5, 1e4, 256)


def toy_target() -> Target:
    """Four layers, hidden 16, 40 tokens."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * size[-1] ** -0.5

    hidden, inner, heads = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    layers = [
        LayerWeights(
            torch.ones(hidden), random(heads * SHAPE.head_dim, hidden), random(hidden, hidden), torch.ones(hidden),
            random(2 * inner, hidden), random(hidden, inner),
        )
        for _ in range(SHAPE.num_layers)
    ]  # fmt: skip
    embedding = random(SHAPE.vocab_size, hidden) * 4
    return Target(SHAPE, embedding, embedding, layers, torch.ones(hidden), [0, 2])


def toy_drafter(target: Target, relay_hidden_size: int = 0) -> Drafter:
    """Two layers started from the target's, block 4."""
    torch.manual_seed(1)
    drafter = Drafter(
        DrafterConfig.for_target(
            target, num_hidden_layers=2, block_size=4, mask_token_id=1, relay_hidden_size=relay_hidden_size
        )
    )
    drafter.init_from_target(target, [2, 3])
    return drafter


def trajectory_of(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's greedy continuation, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        batch = torch.tensor([ids])
        hidden = target.forward(batch, torch.arange(len(ids))[None], causal_attend(target.shape)).hidden
        ids.append(int(target.logits(hidden[0, -1]).argmax()))
    return ids[len(prompt) :]


def toy_samples(target: Target, count: int) -> list[Sample]:
    """Conversations of different lengths with the target's own answers and states."""
    samples = []
    for index in range(count):
        prompt = torch.randint(3, 40, (3 + index % 3,), generator=torch.Generator().manual_seed(index)).tolist()
        tokens = torch.tensor(prompt + trajectory_of(target, prompt, 14 + index))
        full = target.forward(tokens[None], torch.arange(len(tokens))[None], causal_attend(target.shape), capture=True)
        assert full.captured is not None
        samples.append(Sample(f"toy/{index}", "toy", tokens, len(prompt), full.captured[0, :-1]))
    return samples


class ToyTokenizer:
    """A tokenizer of the toy target's 40 ids; texts it was shown by ``remember`` come back from ``decode``."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, ...], str] = {}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """Roles by their first letter, one message a line."""
        assert not tokenize
        text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in messages)
        return text + ("a:" if add_generation_prompt else "")

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """One token a character."""
        assert not add_special_tokens
        return {"input_ids": [3 + ord(character) % 37 for character in text]}

    def remember(self, text: str) -> list[int]:
        """Ids that ``decode`` turns into ``text``."""
        ids = [3 + len(self._texts) // 30, 3 + len(self._texts) % 30, *([5] * len(text))]
        self._texts[tuple(ids)] = text
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """A remembered text, else one letter a token."""
        assert skip_special_tokens
        return self._texts.get(tuple(ids), "".join(chr(61 + token) for token in ids))
