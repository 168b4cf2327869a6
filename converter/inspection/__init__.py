"""Inspects models, and reports conversions as JSON, Markdown or HTML."""

from edge_opt.inspection.model import Inspection, inspect
from edge_opt.inspection.picture import find_example
from edge_opt.inspection.report import Report, check_report_path, conversion_report

__all__ = [
    "Inspection",
    "Report",
    "check_report_path",
    "conversion_report",
    "find_example",
    "inspect",
]
