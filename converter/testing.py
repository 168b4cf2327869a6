"""Assertions for your tests: two models have the same outputs, or a model still matches its golden file.

Needs no test framework; each assertion starts the runtime in a child process.
"""

from typing import Any, Literal

from edge_opt.base.atomic import AnyPath
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import ComparisonReport
from edge_opt.comparison.golden import check
from edge_opt.comparison.golden import record as record_golden
from edge_opt.ir.opening import ModelLike
from edge_opt.npu.comparing import compare_on_npu

__all__ = ["assert_equivalent", "assert_golden", "record_golden"]


def assert_equivalent(
    a: ModelLike,
    b: ModelLike,
    *,
    on: Literal["cpu", "reference", "npu"] = "cpu",
    atol: float = 0.0,
    rtol: float = 0.0,
    **options: Any,
) -> ComparisonReport:
    """Assert that |a-b| <= atol + rtol*|a| for every output of every signature, and return the report.

    On the NPU, both models run in its compiler's emulator. `options` go to `edge_opt.compare` (`signatures`, `seed`,
    `shapes`, ...) or `edge_opt.npu.compare_on_npu` (`compiler`, ...).

    Raises:
        AssertionError: the models differ; the message has one line for each difference.
        EdgeOptError: the models could not be compared.
    """
    if on == "npu":
        return _assert_equal(compare_on_npu(a, b, atol=atol, rtol=rtol, **options))
    return _assert_equal(compare(a, b, on=on, atol=atol, rtol=rtol, **options))


def assert_golden(model: ModelLike, path: AnyPath) -> ComparisonReport:
    """Assert that a model matches a file written by `record_golden` or `edge-opt golden record`, and return the report.

    Raises:
        AssertionError: outputs differ; the message has one line for each difference.
        EdgeOptError: the file or the model could not be used.
    """
    return _assert_equal(check(model, path))


def _assert_equal(report: ComparisonReport) -> ComparisonReport:
    if not report.equal:
        lines = "\n".join(f"  {line}" for line in report.differences())
        raise AssertionError(f"'{report.b}' differs from '{report.a}':\n{lines}")
    return report
