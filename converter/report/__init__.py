"""What users read about a conversion: its sentences, and a report as JSON, Markdown or one HTML page."""

from edge_opt.report.document import Example, Report
from edge_opt.report.writing import check_report_path, write_report

__all__ = ["Example", "Report", "check_report_path", "write_report"]
