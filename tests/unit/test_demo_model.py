"""The demo target: checksum, marker, and the parts of the conversion that need no download."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sglang_dflow import demo_model


def test_altered_gguf_is_refused_with_both_checksums(tmp_path: Path) -> None:
    """Catches a target built from anything but the pinned file."""
    kept = tmp_path / "downloads" / demo_model.GGUF_NAME
    kept.parent.mkdir()
    kept.write_bytes(b"not the model")
    with pytest.raises(RuntimeError) as error:
        demo_model.ensure_demo_target(tmp_path, log=lambda line: None)
    message = str(error.value)
    assert demo_model.GGUF_SHA256 in message and demo_model.file_sha256(kept) in message
    assert f"Delete {kept}" in message


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    """Catches a typo becoming a directory name."""
    with pytest.raises(ValueError, match="float32, bfloat16"):
        demo_model.ensure_demo_target(tmp_path, dtype="fp8")


def _whole_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    marker = {
        "gguf_sha256": demo_model.GGUF_SHA256,
        "converter": demo_model.CONVERTER_VERSION,
        "dtype": "float32",
        "files": {"config.json": demo_model.file_sha256(path / "config.json")},
    }
    (path / demo_model.MARKER).write_text(json.dumps(marker))
    return path


def test_marker_detects_alteration_and_older_converters(tmp_path: Path) -> None:
    """Catches a half-written, altered or outdated directory being served."""
    path = _whole_directory(tmp_path / "target")
    assert demo_model.directory_problem(path, "float32") is None
    assert "dtype" in str(demo_model.directory_problem(path, "bfloat16"))
    (path / "config.json").write_text("{ }")
    assert "altered" in str(demo_model.directory_problem(path, "float32"))
    (path / "config.json").unlink()
    assert "missing" in str(demo_model.directory_problem(path, "float32"))
    (path / demo_model.MARKER).write_text('{"converter": 0}')
    assert demo_model.directory_problem(path, "float32") is not None
    (path / demo_model.MARKER).write_text("{")
    assert "unreadable" in str(demo_model.directory_problem(path, "float32"))
    assert "no marker" in str(demo_model.directory_problem(tmp_path / "absent", "float32"))


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a half-written directory under the final name."""

    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_ensure_gguf", lambda cache, log: tmp_path / "x.gguf")
    monkeypatch.setattr(demo_model, "_write_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        demo_model.ensure_demo_target(tmp_path / "cache", log=lambda line: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_processes_wait_for_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second build that takes the directory away from a server of the first; locks of threads count, too."""
    builds: list[Path] = []

    def build(gguf_path: Path, target: Path, dtype: str, log: demo_model.Log) -> None:
        builds.append(target)
        time.sleep(0.2)
        _whole_directory(target)

    monkeypatch.setattr(demo_model, "_ensure_gguf", lambda cache, log: tmp_path / "x.gguf")
    monkeypatch.setattr(demo_model, "_build", build)
    with ThreadPoolExecutor(max_workers=2) as callers:
        found = list(callers.map(demo_model.ensure_demo_target, [tmp_path / "cache"] * 2))
    assert found == builds * 2


def test_unpermute_restores_half_split_rows() -> None:
    """Catches a wrong row order of q and k: llama.cpp interleaves the two rotary halves of each head."""
    half_split = np.arange(2 * 6 * 3).reshape(12, 3)  # 2 heads of 6 rows
    interleaved = half_split.reshape(2, 2, 3, 3).swapaxes(1, 2).reshape(12, 3)
    assert interleaved[:4, 0].tolist() == [0, 9, 3, 12]  # rows 0, 3, 1, 4 of the first head
    assert np.array_equal(demo_model.unpermute_rope(interleaved, heads=2), half_split)


def test_tensor_names() -> None:
    """Catches an unknown tensor being dropped in silence."""
    assert demo_model._hf_name("blk.7.attn_q.weight") == "model.layers.7.self_attn.q_proj.weight"
    assert demo_model._hf_name("output_norm.weight") == "model.norm.weight"
    with pytest.raises(RuntimeError, match="unexpected GGUF tensor"):
        demo_model._hf_name("rope_freqs.weight")
