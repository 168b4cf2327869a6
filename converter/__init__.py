"""edge-opt: rewrites the attention of .tflite language models for NPUs, and verifies each rewrite.

Importing this module loads nothing else; the first use of a public name loads its module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_opt import ir, npu, passes, shapes, testing
    from edge_opt.base.errors import EdgeOptError, ModelFormatError, OutputError, UsageError
    from edge_opt.building import build
    from edge_opt.building.evaluation import evaluate
    from edge_opt.building.stages import BuildCheckError, StageFailedError
    from edge_opt.comparison.compare import compare
    from edge_opt.comparison.findings import ComparisonReport
    from edge_opt.comparison.golden import GoldenError
    from edge_opt.conversion import (
        ConversionResult,
        DifferenceFoundError,
        SitesSkippedError,
        convert,
    )
    from edge_opt.inspection import inspect
    from edge_opt.ir import Model, load, save
    from edge_opt.npu.compiler import CompilerFailedError, CompilerMissingError
    from edge_opt.runtime.protocol import RuntimeUnavailable
    from edge_opt.shapes import infer_shapes

    __version__: str

__all__ = [
    "BuildCheckError",
    "ComparisonReport",
    "CompilerFailedError",
    "CompilerMissingError",
    "ConversionResult",
    "DifferenceFoundError",
    "EdgeOptError",
    "GoldenError",
    "Model",
    "ModelFormatError",
    "OutputError",
    "RuntimeUnavailable",
    "SitesSkippedError",
    "StageFailedError",
    "UsageError",
    "__version__",
    "build",
    "compare",
    "convert",
    "evaluate",
    "infer_shapes",
    "inspect",
    "ir",
    "load",
    "npu",
    "passes",
    "save",
    "shapes",
    "testing",
]

# Modules that define the functions and classes; the other public names are modules.
_HOMES = {
    "BuildCheckError": "building.stages",
    "ComparisonReport": "comparison.findings",
    "CompilerFailedError": "npu.compiler",
    "CompilerMissingError": "npu.compiler",
    "ConversionResult": "conversion",
    "DifferenceFoundError": "conversion",
    "EdgeOptError": "base.errors",
    "GoldenError": "comparison.golden",
    "Model": "ir",
    "ModelFormatError": "base.errors",
    "OutputError": "base.errors",
    "RuntimeUnavailable": "runtime.protocol",
    "SitesSkippedError": "conversion",
    "StageFailedError": "building.stages",
    "UsageError": "base.errors",
    "build": "building",
    "compare": "comparison.compare",
    "convert": "conversion",
    "evaluate": "building.evaluation",
    "infer_shapes": "shapes",
    "inspect": "inspection",
    "load": "ir",
    "save": "ir",
}


if not TYPE_CHECKING:  # hidden from type checkers, which then report unknown names

    def __getattr__(name: str) -> object:
        """Load a public name at its first use."""
        if name not in __all__:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        if name == "__version__":
            value = import_module("importlib.metadata").version("edge-opt")
        else:
            value = import_module(f"{__name__}.{_HOMES.get(name, name)}")
            value = getattr(value, name) if name in _HOMES else value
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
