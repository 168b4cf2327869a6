"""Recognizes what people give in place of a model or a checkpoint, and says what to give instead."""

import os
import re
from pathlib import Path

ENOUGH = 256
"""Bytes of a file's beginning that are enough to recognize it."""
_BEGINNINGS = {
    rb"LITERTLM": "a .litertlm bundle: name a model inside it, load(path, model='prefill_decode')",
    rb"GGUF": "a GGUF file: give the checkpoint that it was made from to `edge-opt build`",
    rb"PK\x03\x04.{26}[^\0]*data\.pkl|\x80[\x02-\x05]": "a file of PyTorch weights: give the folder that "
    "`save_pretrained` writes to `edge-opt build`",
    rb"PK|.{4}PK\x03\x04": "a zip archive (a .task bundle?): unzip it, and give the TFLite model inside",
    rb".{8}\{": "a file of weights (safetensors): give its folder to `edge-opt build`",
    rb"\x08[\x01-\x14][\x12\x1a\"*2:B]": "an ONNX model: export the original with litert-torch",
    rb"\s*<(?:[!?]|(?i:html))": "a web page, saved in place of the file: download the file itself",
    rb"version ": "a Git LFS pointer: fetch the file with `git lfs pull`",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


def recognized(start: bytes) -> str:
    """What a file is that begins so, and what to do; empty if unknown."""
    for pattern, text in _BEGINNINGS.items():
        if re.match(pattern, start, re.DOTALL):
            return text
    return ""


def remedy_if_missing(path: str | os.PathLike[str]) -> str:
    """What to do about a path that does not exist, which may be a model's name on a hub."""
    name = os.fspath(path)
    if _HUB_NAME.fullmatch(name) and not Path(name).parent.exists():
        return f"if this is a name on Hugging Face, download it first: hf download {name} --local-dir FOLDER"
    return "check the path"
