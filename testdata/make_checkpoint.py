"""Make a checkpoint as somebody who tuned a Gemma3 has one: a Hugging Face folder, with random weights.

    make_checkpoint.py FOLDER [--layers 3] [--hidden 640] [--ffn 2048] [--heads 4] [--kv-heads 1] [--head-size 256]
                       [--vocab 8192] [--window 512] [--longest 8192] [--architecture gemma3]

Writes the folder and, beside it, FOLDER.jsonl with prompts to calibrate with, short and long. The sizes are
Gemma3-270M's but for layers and vocabulary (18 and 262144 there); of three layers one attends to everything. The
tokenizer knows words "w4", "w5", ... Needs the extra `build`.
"""

import argparse
import json
from pathlib import Path

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
FIRST, KNOWN = 4, 400
WORDS = (60, 250, 900, 1150, 2000)
"""Of each prompt. Long ones go on well beyond a prefill and nearly fill a cache: no shorter ones reach every range."""


def make(folder: Path, architecture: str = "gemma3", longest: int = 8192, **sizes: int) -> Path:
    """Write the checkpoint, and the prompts beside it; returns those."""
    told = Sizes(**{**SIZES, **sizes})
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(told.layers)]
    config = {"max_position_embeddings": longest, "initializer_range": 0.006}
    save_checkpoint(
        architecture, told, folder, **config, **({"layer_types": kinds} if "gemma" in architecture else {})
    )
    prompts = folder.with_suffix(".jsonl")
    most = min(KNOWN, told.vocab - FIRST)
    lines = (
        " ".join(f"w{(7 * line + 13 * word) % most + FIRST}" for word in range(words))
        for line, words in enumerate(WORDS)
    )
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return prompts


def main() -> None:
    """Make the one that the command line describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--architecture", default="gemma3")
    options = vars(parser.parse_args())
    print(make(options.pop("folder"), **options))


if __name__ == "__main__":
    main()
