"""The main job: a model is read, rewritten, proved and written; and the result, as data and in sentences."""

from edge_opt.conversion.choices import GENERIC, ConvertOptions, Verify, default_output
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    NothingMatchedError,
    RequirementError,
    SignatureSummary,
    SitesLeftError,
    UnsoundError,
)
from edge_opt.conversion.run import convert

__all__ = [
    "GENERIC",
    "ConversionResult",
    "ConvertOptions",
    "DifferenceFoundError",
    "NothingMatchedError",
    "RequirementError",
    "SignatureSummary",
    "SitesLeftError",
    "UnsoundError",
    "Verify",
    "convert",
    "default_output",
]
