"""Inspects models, and reports conversions as JSON, Markdown or HTML."""

from edge_opt.inspection.caches import Cache, Caches, find_caches
from edge_opt.inspection.model import AttentionBlock, Inspection, inspect
from edge_opt.inspection.picture import Example, find_example
from edge_opt.inspection.report import FORMATS, Report, check_report_path, conversion_report

__all__ = [
    "FORMATS",
    "AttentionBlock",
    "Cache",
    "Caches",
    "Example",
    "Inspection",
    "Report",
    "check_report_path",
    "conversion_report",
    "find_caches",
    "find_example",
    "inspect",
]
