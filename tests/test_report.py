"""Reports: the same content in every format, nothing of a model's names taken for markup, no file lost to one."""

import hashlib
import html
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Captured, run, state, written
from pass_runs import SELECT_PAGE, but
from syrupy.assertion import SnapshotAssertion

from edge_opt import EdgeOptError, convert, load
from edge_opt.base.packages import RUNTIME, version_of
from edge_opt.inspection import Report, conversion_report, find_example
from edge_opt.inspection.picture import Example, repeats
from edge_opt.inspection.report import to_html
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes import Status
from edge_opt.targets import TargetLike, load_target

LINT = [("warning", "ADD of prefill_8 has a mask of 2 MiB")]
HOSTILE = "<script>alert('1')</script> & `code` | **bold** [link](http://x.test)\n```\n# head ![i](http://x.test/i)"
SUFFIXES = (".json", ".md", ".html")
UNPACK = replace(load_target("generic"), form="unpack")


@cache
def report(path: Path = DEMO) -> Report:
    return replace(conversion_report(convert(path, dry_run=True)), lint=LINT)


@cache
def hostile() -> Report:
    """The demo with tensors and arguments whose names try to be markup, and with a skipped site that quotes one."""
    model = load(DEMO)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.name = f"{HOSTILE}{tensor.name}"
    for signature in model.signatures:
        signature.inputs = {f"{HOSTILE}{name}": tensor for name, tensor in signature.inputs.items()}
        signature.key = f"{HOSTILE}{signature.key}"
    result = convert(to_bytes(model), verify="none")
    left = replace(result.sites[0], index=9, status=Status.SKIPPED, reason=f"at '{HOSTILE}'")
    result.sites.append(left)
    result.input = f"/models/{'long' * 40}{HOSTILE.replace('/', '')}\udc80.tflite"
    return replace(conversion_report(result), lint=[("warning", HOSTILE)])


def words(page: str) -> str:
    """The text that a browser shows; the page is read as XML: no mistake survives that."""
    return " ".join(" ".join(ET.fromstring(page).itertext()).split())


def names(operators: object) -> Counter[str]:
    return Counter(operator.name for operator in operators)  # type: ignore[attr-defined]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_has_summary_signatures_figures_findings_and_origin(
    suffix: str, tmp_path: Path
) -> None:
    text = report().render(suffix)
    said = words(text) if suffix == ".html" else text.replace("\\_", "_")
    verified = "5 of 5 attention blocks split, bit-identical (2 run; 3 repeat their structure)."
    for wanted in (verified, "prefill_8", "decode", LINT[0][1]):
        assert wanted in said
    assert suffix == ".json" or "bit for bit equal; run in full on XNNPACK and" in said
    assert "bit-identical" in report(QUANTIZED).render(suffix)
    result = convert(DEMO, tmp_path / "out.tflite", verify="none")
    text = html.unescape(conversion_report(result).render(suffix)).replace("\\_", "_")
    for path in (DEMO, tmp_path / "out.tflite"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    for module in ("edge_opt", RUNTIME):
        assert str(version_of(module)) in text
    assert re.search(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", text)


def test_json_is_that_of_convert_and_more(capsys: Captured) -> None:
    said = json.loads(report().render(".json"))
    plain = run(capsys, "convert", DEMO, "--dry-run", "--json").json
    assert set(plain) < set(said)
    assert [site["status"] for site in said["sites"]] == ["converted"] * 5
    assert said["lint"] == [{"severity": "warning", "message": LINT[0][1]}]
    assert sum("BATCH_MATMUL" in line for line in said["example"]["before"]) == 4
    assert sum("BATCH_MATMUL" in line for line in said["example"]["after"]) == 16
    result = convert(DEMO, dry_run=True, verify="none")
    result.seconds = float("nan")
    assert json.loads(conversion_report(result).render(".json"))["seconds"] is None


def test_markdown_with_pictures(snapshot: SnapshotAssertion) -> None:
    text = report.__wrapped__().render(".md")  # a new one: names are numbered as they are met
    assert text.partition("## Origin")[0] == snapshot


def test_what_did_not_change_is_said_once_and_that_nothing_was_found_is_said_too(
    tmp_path: Path,
) -> None:
    done = convert(DEMO, signatures="decode", verify="none", dry_run=True)
    assert "| prefill_8 | 122 | not chosen | 5.00 KiB |" in conversion_report(done).render(".md")
    empty = report(written(tmp_path, NO_ATTENTION))
    assert empty.example is None
    for suffix in (".md", ".html"):
        text = replace(conversion_report(done), lint=[]).render(suffix)
        assert "No known problems with the result on this target" in text
        assert "not run" in conversion_report(done).render(suffix)


@pytest.mark.parametrize(("target", "told"), [("mediatek", True), ("generic", False)])
def test_that_rows_masked_everywhere_change_is_said_everywhere(target: str, told: bool) -> None:
    result = convert(to_bytes(parse(SELECT_PAGE)), target=target, skip=but("mask_to_add"))
    made = conversion_report(result, target=target)
    for said in (result.summary(), made.render(".md"), made.render(".html")):
        assert ("rows that are masked everywhere change" in said) is told


def test_the_page_is_well_formed_and_needs_no_network_whatever_names_it_holds() -> None:
    plain, page = report().render(".html"), hostile().render(".html")
    marks, of_hostile = (
        {found for one in ET.fromstring(text).iter() for found in (one.tag, *one.attrib)}
        for text in (plain, page)
    )
    assert of_hostile <= marks
    assert not {"script", "link", "img", "iframe"} & marks
    page.encode(errors="strict")
    assert "<script>alert('1')</script>" in words(page)
    assert not re.search(r"https?:|src=|url\(|@import", plain)
    assert "1 * 2 &lt; #" in to_html("1 * 2 < #", "", [])


def test_names_in_a_model_are_text_and_not_markdown() -> None:
    text = hostile().render(".md")
    outside = re.sub(r"(?ms)^(```+)mermaid\n.*?\n\1$", "", text)
    assert outside.count("```") == 0, "a name ended a block of code"
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\[link", outside)
    assert not re.search(r"(?<!\\)\*\*bold", outside)
    assert not re.search(r"(?m)^# head", text)
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 5}
    for label in re.findall(r'"(.*)"', text.partition("```mermaid")[2]):
        assert not set(label) & set('"<>`{}()|')


def test_a_block_is_shown_with_every_operator_and_one_head_of_those_that_are_alike() -> None:
    example = report().example
    page = words(report().render(".html"))
    for operators, hidden in ((example.before, 0), (example.after, 33)):
        lines, graph = example.lines(operators), example.mermaid(operators)
        assert [sum(word in line for line in lines) for word in ("BATCH_MATMUL", "SOFTMAX")] == [
            4,
            1,
        ]
        assert len(lines) == len(operators) - hidden + bool(hidden)
        assert (
            ("... 3 more like these 11 ..." in lines) is ("3 more like it" in graph) is bool(hidden)
        )
        drawn = Counter(re.findall(r'n\d+\["(\w+)"\]', graph))
        assert drawn.total() + hidden == len(operators)
        assert drawn <= names(operators)
        assert all(" ".join(line.split()) in page for line in lines)
    assert "CONCATENATION(%mask_local, %mask_local, %mask_local, %mask_local)" in page


@pytest.mark.parametrize(
    ("target", "cut"),
    [("generic", "SPLIT"), (UNPACK, "UNPACK"), ("qualcomm-htp", "SPLIT")],
    ids=["split", "unpack", "several passes"],
)
def test_a_block_is_shown_before_the_first_rewrite_and_as_written(
    target: TargetLike, cut: str
) -> None:
    """In the form that was chosen; also of a model that is edited in place."""
    model = load(DEMO)
    example = find_example(convert(model, target=target, verify="none"))
    before, after = names(example.before), names(example.after)
    assert (before[cut], before["BATCH_MATMUL"], before["SOFTMAX"], after[cut]) == (0, 4, 1, 1)
    assert after["BATCH_MATMUL"] == 16
    if target == "qualcomm-htp":
        assert after["ADD"] > after["SOFTMAX"] * 3, "masks are added before joining"
    written_ones = {one for graph in model.subgraphs for one in graph.operators}
    assert set(example.after) <= written_ones
    assert written_ones.isdisjoint(example.before)


def test_a_block_that_two_passes_rewrote_is_shown_as_the_file_has_it() -> None:
    model = parse(SELECT_PAGE)
    example = find_example(convert(model, verify="none"))
    before, after = names(example.before), names(example.after)
    counts = [
        [found[name] for name in ("SELECT_V2", "ADD", "SOFTMAX")] for found in (before, after)
    ]
    assert counts == [[1, 0, 1], [0, 4, 4]]


def test_the_picture_calls_a_composite_by_its_own_name_and_draws_an_input_once() -> None:
    model = parse("""
        subgraph main (%x: float32[1,4]) {
          %n: float32[1,4] = STABLEHLO_COMPOSITE(%x) {name: 'odml.rms_norm', decomposition_subgraph_index: 1}
          %y: float32[1,4] = MUL(%n, %x)
          return %y
        }
        subgraph body (%x: float32[1,4]) {
          %y: float32[1,4] = NEG(%x)
          return %y
        }""")
    operators = [*model.subgraphs[0].operators]
    lines = (
        Example("f", operators, operators, lambda tensor: tensor.name)
        .mermaid(operators)
        .splitlines()
    )
    assert lines[1:4] == ['  n0(["x"])', '  n1["odml.rms_norm"]', '  n2["MUL"]']
    assert sorted(lines[4:]) == [f'  n{a} --> |"[1, 4]"| n{b}' for a, b in ((0, 1), (0, 2), (1, 2))]


def test_the_longest_repetition_is_found_where_a_head_ends() -> None:
    head = ["mul", "max", "exp", "add"]
    kinds = ["split", "scale", "mul", "add", *head * 3, "concat"]
    found = repeats(kinds)
    assert found == range(8, 16, 4)
    assert kinds[found.start : found.stop] == head * 2
    assert not repeats(head[1:] * 3), "too short to be hidden"


def test_convert_writes_a_report_for_each_format_that_was_asked_for(
    tmp_path: Path, capsys: Captured
) -> None:
    paths = [tmp_path / f"report{suffix}" for suffix in SUFFIXES]
    reports = [given for path in paths for given in ("--report", path)]
    ran = run(capsys, "convert", DEMO, "-o", tmp_path / "o.tflite", *reports)
    assert (ran.code, ran.err) == (0, "")
    for path in paths:
        assert f"Report: {path}" in ran.out
        assert "5 of 5 attention blocks split" in path.read_text()
    report().write(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text(encoding="utf-8") == report().render(".html")
    with pytest.raises(EdgeOptError, match="exists"):
        report().write(tmp_path / "mine.html")


def test_a_report_is_refused_before_the_work(tmp_path: Path, capsys: Captured) -> None:
    output, path, model = tmp_path / "o.tflite", tmp_path / "r.md", tmp_path / "model.json"
    model.write_bytes(DEMO.read_bytes())
    spelled = tmp_path / ".." / tmp_path.name / model.name
    path.write_text("mine")
    before = state(tmp_path)
    for source, out, reports, code, said in (
        (DEMO, output, [tmp_path / "r.pdf"], 2, "the ending must be one of .json, .md, .html"),
        (DEMO, output, [path], 2, "exists: pass --force"),
        (DEMO, output, [tmp_path / "no" / "r.md"], 5, "does not exist"),
        (DEMO, output, [path, path, "--force"], 2, "that this run reads or writes"),
        (spelled, output, [model, "--force"], 2, "that this run reads or writes"),
        (f"{model}:embedder", output, [model, "--force"], 2, "that this run reads or writes"),
        (DEMO, model, [model, "--force"], 2, "that this run reads or writes"),
    ):
        given = [x for one in reports for x in ([one] if one == "--force" else ["--report", one])]
        assert said in run(capsys, "convert", source, "-o", out, *given).failed_in_one_sentence(
            code
        )
        assert state(tmp_path) == before
    assert run(capsys, "convert", DEMO, "-o", output, "--report", path, "--force").code == 0
    assert "mine" not in path.read_text()
