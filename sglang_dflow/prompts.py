"""Prompts: the project's one file format, and the sets that need no file.

A prompt file holds one JSON object a line: `{"id": .., "turns": [..]}` is a chat (its first turn is sent, through
the model's chat template), `{"id": .., "text": ..}` is sent as it is. The built-in sets were written for this
project: no public evaluation set is in them, and no drafter of ours was trained on them.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One prompt; `chat` says whether the model's chat template wraps it."""

    id: str
    text: str
    chat: bool = True

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the ids that are sent to the server."""
        if not self.chat:
            return list(tokenizer.encode(self.text))
        messages = [{"role": "user", "content": self.text}]
        wrapped = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(wrapped, add_special_tokens=False))


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompt file.

    Raises:
        ValueError: the first line that is not a prompt, with what was expected.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            prompts.append(_parse(line, where=f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _parse(line: str, *, where: str) -> Prompt:
    expected = 'expected {"id": .., "turns": ["..", ..]} or {"id": .., "text": ".."}'
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); {expected}") from error
    if isinstance(entry, dict):
        name = str(entry.get("id", where))
        turns, text = entry.get("turns"), entry.get("text")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return Prompt(id=name, text=turns[0])
        if isinstance(text, str) and text:
            return Prompt(id=name, text=text, chat=False)
    raise ValueError(f"{where}: {expected}")


_MATHS = (
    "A baker makes 14 trays of rolls with 12 rolls on each tray and sells 9 dozen. How many rolls are left?",
    "Nadia reads 23 pages on Monday and twice as many on Tuesday. The book has 180 pages. How many are left?",
    "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes on the way. How long does it move?",
    "Tom has 3 times as many marbles as Ana. Together they have 64. How many marbles does Tom have?",
    "A shirt costs $28 and is sold at 15% off. What does it cost now? Explain each step.",
    "Solve for x: 3x + 7 = 2x - 5. Show your work.",
    "What is the sum of the first 20 odd numbers? Explain why.",
    "A tank holds 240 litres. One pipe fills it in 6 hours, another in 4. How long do both need together?",
    "Find the area of a triangle with sides 13, 14 and 15. Reason step by step.",
    "If 5 machines make 5 parts in 5 minutes, how long do 100 machines need for 100 parts?",
    "The average of four numbers is 18. Three of them are 12, 20 and 25. What is the fourth?",
    "A recipe for 4 people needs 300 g of flour. How much flour is needed for 7 people?",
)
_CODE = (
    "Write a Python function that returns the second largest number of a list.",
    "Write a Python function that checks whether a string is a palindrome, ignoring spaces and case.",
    "Write a Python function to merge two sorted lists into one sorted list.",
    "Write a function that counts the vowels in a sentence, with a short docstring.",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Explain what this code prints:\n```python\nfor i in range(3):\n    print(i * i)\n```",
    "Write a Python function that computes the factorial of n without recursion.",
    "Write a SQL query that lists the five customers with the most orders.",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Write a JavaScript function that reverses the words of a sentence.",
    "Write a Python function that converts a Roman numeral to an integer.",
    "Write a Python function to find the greatest common divisor of two numbers.",
)
_CHAT = (
    "What is the capital of France? Answer in one sentence.",
    "Give me three tips for better sleep.",
    "Write a short thank-you note to a teacher.",
    "Explain photosynthesis to a ten-year-old.",
    "What are the advantages and disadvantages of working from home?",
    "Write a four-line poem about the sea.",
    "Summarise why the Roman Empire fell in five bullet points.",
    "Suggest a simple dinner with rice, eggs and tomatoes.",
    "Describe the water cycle in a few sentences.",
    "Write an email that asks a colleague to move a meeting to Thursday.",
    "What is the difference between weather and climate?",
    "Tell me a short story about a fox that learns to share.",
)


def demo_prompts() -> list[Prompt]:
    """Return 12 chat prompts, four each of maths, code and conversation."""
    groups = (("maths", _MATHS), ("code", _CODE), ("chat", _CHAT))
    return [Prompt(id=f"{name}/{i}", text=text) for name, texts in groups for i, text in enumerate(texts[:4])]


def varied_prompts() -> list[Prompt]:
    """Return 64 prompts: chat, code and maths, plain continuations, one token up to about 1,500 tokens.

    The long ones are documentation and source of the running Python's standard library.
    """
    groups: Iterable[tuple[str, tuple[str, ...]]] = (("maths", _MATHS), ("code", _CODE), ("chat", _CHAT))
    chats = [Prompt(id=f"{name}/{i}", text=text) for name, texts in groups for i, text in enumerate(texts)]
    plain_texts = (
        "The",
        "Once",
        "def fibonacci(n):",
        "import os\nimport sys\n\n\ndef main():\n",
        "The three most important rules are:\n1.",
        "1, 2, 3, 4, 5, 6, 7,",
        "Dear Sir or Madam,\n\nI am writing to",
        "Question: What is 17 + 25?\nAnswer:",
    )
    plain = [Prompt(id=f"plain/{i}", text=text, chat=False) for i, text in enumerate(plain_texts)]
    source = inspect.getsource(textwrap)
    # About 3.5 characters a token: 100 to 1,500 tokens.
    lengths = (350, 700, 1050, 1400, 1750, 2100, 2450, 2800, 3500, 5200)
    long_chat = [
        Prompt(id=f"explain/{n}", text=f"Explain what this Python code does.\n```python\n{source[:n]}\n```")
        for n in lengths
    ]
    long_plain = [Prompt(id=f"source/{n}", text=source[n : 2 * n], chat=False) for n in lengths]
    return [*chats, *plain, *long_chat, *long_plain]
