"""Make a checkpoint as somebody who tuned a Gemma3 has one: a Hugging Face folder.

    make_checkpoint.py FOLDER [--layers 3] [--hidden 640] [--ffn 2048] [--heads 4] [--kv-heads 1] [--head-size 256]
                       [--vocab 8192] [--window 512] [--longest 8192] [--architecture gemma3] [--train STEPS]

Writes the folder and, beside it, FOLDER.jsonl with prompts to calibrate with, short and long. The sizes are
Gemma3-270M's but for layers and vocabulary (18 and 262144 there); of three layers one attends to everything. The
tokenizer knows words "w4", "w5", ... Needs the extra `build`.

Weights are random, unless it trains on documentation that Python has with it: `--train 800` took 20 minutes on one
core of a busy machine. Sizes are smaller then, and FOLDER.held-out.jsonl has text that it did not see.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import training
from checkpoints import Sizes, save_checkpoint

SIZES = {
    "layers": 3,
    "hidden": 640,
    "ffn": 2048,
    "heads": 4,
    "kv_heads": 1,
    "head_size": 256,
    "vocab": 8192,
    "window": 512,
}
TRAINED = {"hidden": 192, "ffn": 512, "head_size": 64, "vocab": 2048}
FIRST, KNOWN = 4, 400
WORDS = (60, 250, 900, 1150, 2000)
"""Of each prompt. Long ones go on well beyond a prefill and nearly fill a cache: no shorter ones reach every range."""


def make(folder: Path, architecture: str = "gemma3", longest: int = 8192, **sizes: int) -> Path:
    """Write the checkpoint, and the prompts beside it; returns those."""
    told = Sizes(**{**SIZES, **sizes})
    kinds = [
        "full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(told.layers)
    ]
    config = {"max_position_embeddings": longest, "initializer_range": 0.006}
    save_checkpoint(
        architecture,
        told,
        folder,
        **config,
        **({"layer_types": kinds} if "gemma" in architecture else {}),
    )
    most = min(KNOWN, told.vocab - FIRST)
    lines = (
        " ".join(f"w{(7 * line + 13 * word) % most + FIRST}" for word in range(words))
        for line, words in enumerate(WORDS)
    )
    return _write(folder.with_suffix(".jsonl"), lines)


def make_trained(folder: Path, steps: int, longest: int = 8192, **sizes: int) -> Path:
    """Write the checkpoint after training, the prompts and the held-out text beside it; returns the prompts."""
    known, unseen = training.make_trained(
        folder, Sizes(**{**SIZES, **TRAINED, **sizes}), steps, max_position_embeddings=longest
    )
    _write(folder.with_name(f"{folder.name}.held-out.jsonl"), unseen)
    return _write(folder.with_suffix(".jsonl"), known)


def _write(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return path


def main() -> None:
    """Make the one that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--train", type=int, metavar="STEPS")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--architecture", default="gemma3")
    options = {
        name: value for name, value in vars(parser.parse_args()).items() if value is not None
    }
    if "train" not in options:
        print(make(**options))
    elif options.pop("architecture") == "gemma3":
        print(make_trained(steps=options.pop("train"), **options))
    else:
        parser.error("--train knows --architecture gemma3 only")


if __name__ == "__main__":
    main()
