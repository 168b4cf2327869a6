"""Make the two models that `edge-opt demo` ships: a tiny Gemma3 with random weights, float32 and int16/int8.

    make_demo.py [OUT_DIR]

Writes demo_gemma3.tflite and demo_gemma3_a16w8.tflite (beside this script by default), the same bytes on every
run with the same exporter and quantizer. Needs the extras `torch` and `quantizer`. Exported as users export
Gemma3: cache split, embeddings as an input.
"""

import sys
from pathlib import Path

from checkpoints import HuggingFace, Sizes
from quantize_model import quantize

# Three layers: local, global, local. Small in every direction, so that the package stays small.
SIZES = Sizes(
    layers=3,
    heads=4,
    kv_heads=1,
    head_size=16,
    hidden=64,
    ffn=80,
    vocab=64,
    prefill=8,
    cache=32,
    window=16,
)
NAME = "demo_gemma3"
RECIPE = "a16w8"


def main() -> int:
    """Write both models into the folder named on the command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    plain, quantized = folder / f"{NAME}.tflite", folder / f"{NAME}_{RECIPE}.tflite"
    HuggingFace("gemma3", SIZES, {"externalize_embedder": True})(plain)
    quantize(plain, quantized, RECIPE)
    for path in (plain, quantized):
        path.chmod(0o644)  # the quantizer makes its file executable
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
