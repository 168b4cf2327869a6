"""What users read about a conversion: one report as JSON, Markdown or a page that needs no network."""

from edge_opt.report.document import Example, Report, check_report_path, write_report

__all__ = ["Example", "Report", "check_report_path", "write_report"]
