"""Converts a model: reads, rewrites, verifies and writes it, and describes the result."""

from edge_opt.conversion.models import Sections
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    SitesSkippedError,
)
from edge_opt.conversion.run import GENERIC, Verify, convert, default_output

__all__ = [
    "GENERIC",
    "ConversionResult",
    "DifferenceFoundError",
    "Sections",
    "SignatureSummary",
    "SitesSkippedError",
    "Verify",
    "convert",
    "default_output",
]
