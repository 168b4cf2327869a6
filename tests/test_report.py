"""Reports: the same content in every format, nothing of a model's names taken for markup, no file lost to one."""

import hashlib
import html
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import pytest
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, run, state, written
from text_parser import parse

from edge_opt import EdgeOptError, convert, load
from edge_opt.inspection import conversion_report
from edge_opt.ir import to_bytes
from edge_opt.passes import SiteReport, Status
from edge_opt.report import Report, write_report
from edge_opt.report import page as page_module
from edge_opt.report.document import hoisted, longest_repeat
from edge_opt.report.page import _WIDTH, _Box, _layout, can_draw, draw
from edge_opt.report.writing import render

needs_igraph = pytest.mark.skipif(not can_draw(), reason="no igraph here: pip install '.[report]'")
Captured = pytest.CaptureFixture[str]
LINT = [("warning", "ADD of prefill_8 has a mask of 2 MiB")]
HOSTILE = (
    "<script>alert('1')</script> & `code` | **bold** [link](http://x.test)\n```\n# head ![i](http://x.test/i)"
)
SUFFIXES = (".json", ".md", ".html")
EMPTY = ("meta", "br", "img", "hr", "input", "link")


@cache
def report(path: Path = DEMO) -> Report:
    result = convert(path, dry_run=True)
    return replace(conversion_report(result), lint=LINT)


@cache
def hostile() -> Report:
    """The demo with tensors and arguments whose names try to be markup, and with a left site that quotes one."""
    model = load(DEMO)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            tensor.name = f"{HOSTILE}{tensor.name}"
    for signature in model.signatures:
        signature.inputs = {f"{HOSTILE}{name}": tensor for name, tensor in signature.inputs.items()}
        signature.key = f"{HOSTILE}{signature.key}"
    data = to_bytes(model)
    result = convert(data, verify="none")
    left = SiteReport("mha_to_sha", result.sites[0].signature, 9, Status.SKIPPED, f"at '{HOSTILE}'")
    result.sites.append(left)
    result.input = f"/models/{'long' * 40}{HOSTILE.replace('/', '')}\udc80.tflite"
    return replace(conversion_report(result, data), lint=[("warning", HOSTILE)])


class Reader(HTMLParser):
    """What a browser would make of a page: elements, text, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def pictures(page: str) -> list[ET.Element]:
    """Every picture, read as XML, which no mistake survives."""
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def titles(picture: ET.Element) -> Counter[str | None]:
    groups = (group for group in picture.iter("g") if group.get("class") == "operator")
    return Counter(group.findtext("text") for group in groups)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_has_summary_signatures_figures_and_lint(suffix: str) -> None:
    text = render(report(), suffix)
    said = Reader(text).words if suffix == ".html" else text.replace("\\_", "_")
    proved = "5 of 5 sites converted, each proved bit for bit on XNNPACK and the reference kernels."
    for wanted in (proved, "prefill_8", "decode", "bit for bit", LINT[0][1]):
        assert wanted in said
    assert "bit for bit" in render(report(QUANTIZED), suffix)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_report_says_when_with_what_and_of_which_files_it_is(suffix: str, tmp_path: Path) -> None:
    result = convert(DEMO, tmp_path / "out.tflite", verify="none")
    text = html.unescape(render(conversion_report(result), suffix)).replace("\\_", "_")
    for path in (DEMO, tmp_path / "out.tflite"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    for package in ("edge-opt", "ai-edge-litert"):
        assert version(package) in text
    assert re.search(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", text)


def test_json_is_that_of_convert_and_more(tmp_path: Path, capsys: Captured) -> None:
    said = json.loads(render(report(), ".json"))
    plain = run(capsys, "convert", DEMO, "--dry-run", "--json").json
    assert set(plain) < set(said)
    assert [site["status"] for site in said["sites"]] == ["converted"] * 5
    assert said["largest_differences"] == [{"bucket": "bit for bit", "sites": 5}]
    blocks = [(found["name"], found["blocks"], found["blocks_converted"]) for found in said["signatures"]]
    assert blocks == [("prefill_8", 2, 2), ("decode", 3, 3)]
    assert said["lint"] == [{"severity": "warning", "message": LINT[0][1]}]
    assert sum("BATCH_MATMUL" in line for line in said["example"]["before"]) == 4
    assert sum("BATCH_MATMUL" in line for line in said["example"]["after"]) == 16


def test_what_did_not_change_is_said_once_and_that_nothing_was_found_is_said_too() -> None:
    done = convert(DEMO, signatures="decode", verify="none", dry_run=True)
    assert "| prefill_8 | 122 | 0 of 0 | 5.00 KiB |" in render(conversion_report(done), ".md")
    for suffix in (".md", ".html"):
        page = render(replace(conversion_report(done), lint=[]), suffix)
        assert "Nothing in the result that the target is known to refuse" in page


def test_markdown_has_a_row_for_each_signature_and_site() -> None:
    lines = render(report(), ".md").splitlines()
    assert "| prefill_8 | 122 -> 186 | 2 of 2 | 5.00 KiB -> 2.50 KiB |" in lines
    sites = [line for line in lines if line.startswith("| mha_to_sha |")]
    assert len(sites) == 5
    told = "| converted | bit for bit equal; in full on XNNPACK and the reference kernels |"
    assert all(told in line for line in sites)
    assert "| bit for bit | 5 |" in lines


def test_the_page_is_well_formed_and_needs_no_network() -> None:
    page = render(report(), ".html")
    read = Reader(page)
    assert read.open == []
    assert read.elements["details"] == 1
    assert read.elements["figure"] == 2
    assert read.elements["svg"] == 2 * can_draw()
    assert not {"script", "link", "img", "iframe"} & set(read.elements)
    assert not re.search(r"https?:|src=|url\(|@import", page)


@needs_igraph
def test_the_picture_has_every_operator_and_one_head_of_those_that_are_alike() -> None:
    example = report().example
    assert example is not None
    before, after = pictures(render(report(), ".html"))
    assert titles(before) == Counter(operator.name for operator in example.before)
    assert titles(before)["BATCH_MATMUL"] == 4
    shown = titles(after)
    assert shown["BATCH_MATMUL"] == 4
    assert "".join(after.itertext()).count("3 more like it") == 1
    assert "33 operators" in "".join(after.itertext())
    assert shown.total() + 33 == len(example.after) == 48
    assert sum(path.get("class") == "edge" for path in after.iter("path")) >= shown.total()


@needs_igraph
def test_the_picture_calls_a_composite_by_its_own_name() -> None:
    model = parse("""
        signature f = #0 (x=%x) -> (y=%y)
        subgraph main (%x: float32[1,4]) {
          %n: float32[1,4] = STABLEHLO_COMPOSITE(%x) {name: 'odml.rms_norm', decomposition_subgraph_index: 1}
          %y: float32[1,4] = ABS(%n)
          return %y
        }
        subgraph body (%x: float32[1,4]) {
          %y: float32[1,4] = NEG(%x)
          return %y
        }""")
    picture = ET.fromstring(draw(list(model.subgraphs[0].operators), lambda tensor: tensor.name, "a block"))
    assert titles(picture) == Counter(["odml.rms_norm", "ABS"])


def test_the_example_is_drawn_from_the_model_as_it_was(tmp_path: Path) -> None:
    model = load(DEMO)
    result = convert(model)
    assert conversion_report(result).example is None
    example = conversion_report(result, DEMO).example
    assert example is not None
    assert {operator.name for operator in example.before} >= {"SOFTMAX", "TRANSPOSE"}
    assert "SPLIT" not in {operator.name for operator in example.before}


def test_a_model_without_attention_has_a_report_without_a_picture(tmp_path: Path) -> None:
    found = report(written(tmp_path, NO_ATTENTION))
    assert found.example is None
    page = render(found, ".html")
    assert pictures(page) == []
    assert "No region was run." in Reader(page).words
    assert "No region was run." in render(found, ".md")


@pytest.mark.parametrize(("name", "instead"), [("can_draw", lambda: False), ("_MOST_DRAWN", 0)])
def test_without_a_picture_the_page_lists_the_operators(
    name: str, instead: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, name, instead)
    page = render(report(), ".html")
    assert pictures(page) == []
    assert Reader(page).elements["pre"] == 2
    assert "... 3 more like these 11 ..." in Reader(page).words
    assert Reader(page).words.count("= BATCH_MATMUL(") == 4 + 4
    assert Reader(page).words.count("pip install '.[report]'") == (2 if name == "can_draw" else 0)


@needs_igraph
def test_names_in_a_model_are_text_and_not_html() -> None:
    page = render(hostile(), ".html")
    read = Reader(page)
    assert read.open == []
    assert read.elements["script"] == 0
    assert "<script>alert('1')</script>" in read.words
    assert read.attributes <= set(Reader(render(report(), ".html")).attributes)
    assert len(pictures(page)) == 2
    page.encode(errors="strict")


def test_names_in_a_model_are_text_and_not_markdown() -> None:
    text = render(hostile(), ".md")
    outside = re.sub(r"(?ms)^(````+)\n.*?\n\1$", "", text)
    assert outside.count("````") == 0, "a name ended a block of code"
    assert "<script" not in outside
    assert not re.search(r"(?<!\\)\[link", outside)
    assert not re.search(r"(?<!\\)\*\*bold", outside)
    assert not re.search(r"(?m)^# head", text)
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 5, 6}


@pytest.mark.parametrize(("target", "told"), [("mediatek", True), ("generic", False)])
def test_rows_that_are_masked_everywhere_have_a_line_of_their_own_everywhere(target: str, told: bool) -> None:
    text = (Path(__file__).parents[1] / "testdata" / "reference_select.txt").read_text()
    result = convert(to_bytes(parse(text)), target=target, passes=["mask_to_add"])
    figures = result.to_dict()["masked_rows"]
    lines = [line for line in result.summary().splitlines() if "masked everywhere" in line]
    assert [len(lines), figures is not None] == [told, told]
    if told:
        assert (figures["sites"], figures["passes"], figures["max_abs"] > 0.01) == (3, ["mask_to_add"], True)
        change = f"change by up to {figures['max_abs']:.3g} (3 sites of mask_to_add)"
        assert f"But rows that are masked everywhere {change}" in lines[0]
    made = conversion_report(result, target=target)
    for suffix in (".md", ".html"):
        assert ("But rows that are masked everywhere change by up to" in render(made, suffix)) is told
    assert json.loads(render(made, ".json"))["masked_rows"] == figures


def test_a_figure_that_is_not_finite_is_null_in_json() -> None:
    result = convert(DEMO, dry_run=True, verify="none")
    result.seconds = float("nan")
    assert json.loads(render(conversion_report(result), ".json"))["seconds"] is None


def test_convert_writes_a_report_for_each_format_that_was_asked_for(tmp_path: Path, capsys: Captured) -> None:
    paths = [tmp_path / f"report{suffix}" for suffix in SUFFIXES]
    reports = [given for path in paths for given in ("--report", path)]
    ran = run(capsys, "convert", DEMO, "-o", tmp_path / "o.tflite", *reports)
    assert (ran.code, ran.err) == (0, "")
    for path in paths:
        assert f"Report: {path}" in ran.out
        assert "5 of 5 sites converted" in path.read_text()


def test_a_report_is_refused_before_the_work(tmp_path: Path, capsys: Captured) -> None:
    output, path, model = tmp_path / "o.tflite", tmp_path / "r.md", tmp_path / "model.json"
    model.write_bytes(DEMO.read_bytes())
    path.write_text("mine")
    before = state(tmp_path)
    for source, out, reports, code, said in (
        (DEMO, output, [tmp_path / "r.pdf"], 2, "the ending must be one of .json, .md, .html"),
        (DEMO, output, [path], 2, "exists: pass --force"),
        (DEMO, output, [tmp_path / "no" / "r.md"], 5, "does not exist"),
        (DEMO, output, [path, path, "--force"], 2, "that this run reads or writes"),
        (model, output, [model, "--force"], 2, "that this run reads or writes"),
        (DEMO, model, [model, "--force"], 2, "that this run reads or writes"),
    ):
        given = [x for one in reports for x in ([one] if one == "--force" else ["--report", one])]
        assert said in run(capsys, "convert", source, "-o", out, *given).failed_in_one_sentence(code)
        assert state(tmp_path) == before
    assert run(capsys, "convert", DEMO, "-o", output, "--report", path, "--force").code == 0
    assert "mine" not in path.read_text()


def test_the_library_writes_the_same_report(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    write_report(report(), path)
    assert path.read_text(encoding="utf-8") == render(report(), ".html")
    with pytest.raises(EdgeOptError, match="exists"):
        write_report(report(), path)


def test_the_longest_repetition_is_found_where_a_head_ends() -> None:
    kinds = ["split", "scale", "mul", "add", *["mul", "max", "add"] * 3, "concat"]
    stretch = longest_repeat(kinds, at_least=2)
    assert [kinds[place] for place in stretch.hidden] == ["mul", "max", "add"] * 2
    assert (stretch.hidden.stop, stretch.times) == (13, 3)
    assert list(longest_repeat(["a", "b", "c"], at_least=1).hidden) == []
    assert list(longest_repeat(kinds).hidden) == []


def test_what_cuts_for_several_heads_comes_first_and_every_input_before_its_use() -> None:
    example = report().example
    assert example is not None
    ordered = hoisted(list(example.after))
    assert [operator.name for operator in ordered[:2]] == ["RESHAPE", "SPLIT"]
    made = {id(tensor) for operator in ordered for tensor in operator.outputs}
    seen: set[int] = set()
    for operator in ordered:
        assert all(id(t) in seen for t in operator.inputs if id(t) in made)
        seen.update(id(tensor) for tensor in operator.outputs)


@needs_igraph
def test_lines_between_boxes_that_are_not_neighbours_pass_beside_the_boxes_between() -> None:
    boxes = [_Box(name, "", "operator") for name in "abcd"]
    places, routes = _layout(len(boxes), [(0, 1), (1, 2), (2, 3), (0, 3)])
    *short, long = routes
    assert [len(route) for route in short] == [2, 2, 2]
    assert (long[0], long[-1], len(long)) == (places[0], places[3], 4)
    for point, behind in zip(long[1:-1], places[1:3], strict=True):
        assert point[1] == behind[1]
        assert abs(point[0] - behind[0]) > _WIDTH / 2
