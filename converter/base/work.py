"""The layout of a build's work folder, which leads from a compiled bundle to the one that it was made from."""

from pathlib import Path

from edge_opt.base.atomic import AnyPath

MODEL = "model.litertlm"
"""File name of a stage's bundle, in the stage's folder."""
CHECKPOINT = "checkpoint"
"""Name of the checkpoint that a stage writes, in the stage's folder."""
QUANTIZE = "quantize"
"""The stage whose bundle is the last one that can be rewritten."""


def work_folder(output: Path) -> Path:
    """The folder beside a bundle with the results of the stages that made it, each in a folder of its own."""
    return output.with_suffix(".work")


def made_from(compiled: AnyPath | None) -> Path | None:
    """The quantized bundle in the work folder beside a compiled one, or None."""
    if compiled is None:
        return None
    quantized = work_folder(Path(compiled)) / QUANTIZE / MODEL
    return quantized if quantized.is_file() else None
