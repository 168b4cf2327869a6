"""Cuts the region that a pass rewrites out of exported models, as text: the documentation draws its pictures of it.

    python testdata/make_pass_examples.py MODELS

MODELS is what make_families.py wrote, and quantize_model.py beside it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from edge_opt import convert
from edge_opt.inspection import find_example
from edge_opt.ir import Model, Operator, Tensor, load
from edge_opt.ir.text import graphs_text
from edge_opt.ir.walk import cut_out, producers
from edge_opt.passes import PASSES

# pass -> the model that shows it, the entry point, and names for what comes in
SHOWN = {
    "inline_composites": ("gemma3_gpu.tflite", "prefill_14", ("q", "k", "v", "mask", "position")),
    "mask_to_add": ("jax_page.tflite", "serving_default", ("q", "k", "mask")),
    "quantized_mask": ("gemma3_k1.auxiliary.a16w8.tflite", "prefill_mask_14", ("open",)),
}


def main(folder: Path) -> None:
    """One file for each pass, beside this script."""
    for name, (file, signature, inputs) in SHOWN.items():
        path = next(path for path in (folder / file, folder / "q" / file) if path.exists())
        model = load(path)
        others = [other for other in PASSES if other != name]
        example = find_example(convert(model, skip=others, signatures=signature, verify="none"))
        assert example is not None, f"{name} has no site in {file}"
        target = Path(__file__).parent / f"pass_{name}.txt"
        # A product tells that a tensor holds logits.
        above = dict.fromkeys(made for operator in example.before for made in producers(operator))
        products = [operator for operator in above if operator.name == "BATCH_MATMUL"]
        shown = region(model, [*products, *example.before])
        for tensor, known in zip(shown.subgraphs[0].inputs, inputs, strict=True):
            tensor.name = known
        target.write_text(graphs_text(shown), encoding="utf-8")
        print(target)


def region(model: Model, operators: Sequence[Operator]) -> Model:
    """These operators as a model of their own: what they read from outside comes in, the last one's results go out."""
    defined = {id(tensor) for operator in operators for tensor in operator.outputs}
    inputs: dict[int, Tensor] = {}
    for operator in operators:
        for tensor in operator.inputs:
            if tensor is not None and not tensor.is_constant and id(tensor) not in defined:
                inputs[id(tensor)] = tensor
    return cut_out(model, operators, list(inputs.values()), operators[-1].outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
