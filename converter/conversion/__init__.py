"""The main job: a model is read, rewritten, verified and written; and the result, as data and in sentences."""

from edge_opt.conversion.models import Sections
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    SitesLeftError,
)
from edge_opt.conversion.run import GENERIC, Verify, convert, default_output

__all__ = [
    "GENERIC",
    "ConversionResult",
    "DifferenceFoundError",
    "Sections",
    "SignatureSummary",
    "SitesLeftError",
    "Verify",
    "convert",
    "default_output",
]
