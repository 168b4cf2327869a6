"""Converts a model: reads, rewrites, verifies and writes it, and describes the result."""

from edge_opt.conversion.result import ConversionResult, DifferenceFoundError, SitesSkippedError
from edge_opt.conversion.run import convert

__all__ = ["ConversionResult", "DifferenceFoundError", "SitesSkippedError", "convert"]
