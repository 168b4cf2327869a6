"""What one prefill and one token take with everything around the decoder: embedder, rope, masks and cache update."""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_opt.comparison.models import Models
from edge_opt.ir import Model, load, save
from edge_opt.npu.figures import RUNS, Compilation, Figures, Part, SpillFigures, Step
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.process import CompilerFailedError

_INFIX = re.compile(r"_(?:per_layer_)?(embedder|rope|mask|cache_update)(?=_\d|$)")
_PARTS = {"embedder": "embedder", "rope": "rope", "mask": "masks", "cache_update": "cache update"}


def steps_of(
    models: Models, decoders: Sequence[Figures], compiled: Callable[[Path, Model], Compilation]
) -> tuple[Step, ...]:
    """A step for each entry point of the decoder that others serve.

    Args:
        models: of a bundle.
        decoders: figures of the decoder's entry points.
        compiled: compiles a file that holds the model; each entry point of embedder and auxiliary model is compiled
            alone, for one that the compiler refuses must not cost the others.
    """
    decoding = {figures.signature: figures for figures in decoders if isinstance(figures, SpillFigures)}
    serving: dict[str, list[Part]] = {name: [] for name in decoding}
    for given in (models.embedder, models.auxiliary):
        if given is None:
            continue
        model = given if isinstance(given, Model) else load(given)
        for name, _ in model.entry_points():
            found = _INFIX.search(name)
            step = "" if found is None else _INFIX.sub("", name)
            if found is not None and step in serving:
                serving[step].append(_measured(_PARTS[found[1]], name, model, compiled))
    order = [*RUNS].index
    return tuple(
        Step(
            name,
            tuple(sorted([*parts, Part("decoder", name, decoding[name])], key=lambda part: order(part.name))),
        )
        for name, parts in serving.items()
        if parts
    )


def _measured(
    name: str, signature: str, model: Model, compiled: Callable[[Path, Model], Compilation]
) -> Part:
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        file = Path(folder) / f"{signature}.tflite"
        alone = cut_entry_point(model, signature)
        save(alone, file)
        try:
            (figures,) = compiled(file, alone).figures
        except CompilerFailedError as error:
            return Part(name, signature, failure=str(error).partition(": ")[2].partition("; try")[0])
    assert isinstance(figures, SpillFigures)
    return Part(name, signature, figures)
