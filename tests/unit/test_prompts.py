"""prompts.py: the file format, and what the built-in sets promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflow.prompts import Prompt, demo_prompts, read_prompts, varied_prompts


def test_reads_chats_and_plain_texts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "turns": ["hi", "more"]}\n\n{"id": "b", "text": "Once"}\n')
    assert read_prompts(file) == [Prompt("a", "hi", chat=True), Prompt("b", "Once", chat=False)]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "a"}', '{"turns": []}', '{"turns": [3]}', '{"text": ""}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:2.*expected"):
        read_prompts(file)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(file)


def test_built_in_sets() -> None:
    varied = varied_prompts()
    assert len(varied) == 64
    assert len({prompt.id for prompt in varied}) == 64
    assert len({prompt.text for prompt in varied}) == 64
    assert len(demo_prompts()) == 12
