"""The picture of the gain: where the time of a prefill goes, before and after."""

from pathlib import Path

import pytest
from cli_runs import DEMO, Patch

from edge_opt.base.errors import UsageError
from edge_opt.conversion import convert
from edge_opt.inspection import conversion_report
from edge_opt.ir import Model
from edge_opt.npu import Compiler, Figures, TimeEstimate, draw_gain, parts
from edge_opt.npu.profiling import Measured


def measure(model: Model, signature: str, _: Compiler) -> Measured:
    """Every operator takes a microsecond, and every product of activations spills a byte."""
    operators = [one.name for one in model.subgraphs[0].operators]
    time = TimeEstimate("SA8797", len(operators), 0, 0, 0)
    spill = operators.count("BATCH_MATMUL")
    return Measured(signature, Figures(signature, 1, 1, 1, spill=spill, time=time))


def test_parts_take_what_the_graph_up_to_their_end_takes_more_than_up_to_the_part_before(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(parts, "measure", measure)
    after = tmp_path / "after.tflite"
    result = convert(DEMO, after, verify="none")
    gain = draw_gain([DEMO, after], Compiler())
    title, (_, *rows), note = gain
    assert title == "Where the time of prefill_8 goes"
    assert [row[0] for row in rows[::2]] == [
        "all layers",
        "attention, first layers",
        "feed-forward, first layers",
        "norms, first layers",
        "spill",
    ]
    assert {row[1] for row in rows} == {"before", "after"}
    whole, split, attention, more = (float(row[2].removesuffix(" ms")) for row in rows[:4])
    assert whole > attention > 0
    assert split - whole >= more - attention > 0, "only attention got more operators"
    assert rows[1][3] == "█" * 14
    assert rows[3][3] == "█" * 14, "the longest of its layers"
    assert "not timed on a phone" in note
    page = conversion_report(result, gain=gain).render(".html")
    assert '<i class="after" style="width:7.0em"></i>' in page
    assert page.index("Where the time") < page.index("Signatures")
    with pytest.raises(UsageError, match="has no multi-head attention"):
        draw_gain([after], Compiler())
