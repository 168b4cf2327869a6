"""The reference page's graphs, before and after, as text that can be held against the page."""

from __future__ import annotations

from collections import Counter
from importlib import resources

import pytest
from attention_checks import assert_same_bits, convert, random_inputs

from edge_opt.ir import Model, to_bytes
from edge_opt.ir.text import parse, to_text
from edge_opt.passes import Status

GOLDEN = [
    ("reference_prefill", "split"),
    ("reference_prefill", "as-found"),
    ("reference_decode", "split"),
    ("reference_decode", "unpack"),
    ("reference_add", "unpack"),
    ("reference_add", "as-found"),
]


def reference(name: str) -> str:
    return (resources.files("edge_opt.testdata") / f"{name}.txt").read_text(encoding="utf-8")


def without_comments(text: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not line.startswith("# "))


def kinds(model: Model) -> Counter[str]:
    return Counter(operator.name for operator in model.subgraphs[0].operators)


@pytest.mark.parametrize(("name", "form"), GOLDEN)
def test_the_reference_graphs_come_out_as_on_the_page(name: str, form: str) -> None:
    model = parse(reference(name))
    assert {report.status for report in convert(model, form)} == {Status.CONVERTED}
    assert to_text(model) == without_comments(reference(f"{name}_sha"))


@pytest.mark.parametrize("name", ["reference_prefill", "reference_decode", "reference_add"])
def test_the_page_and_its_original_compute_the_same_bits(name: str) -> None:
    before, after = (parse(reference(which)) for which in (name, f"{name}_sha"))
    for kernels in ("xnnpack", "reference"):
        assert_same_bits(to_bytes(before), to_bytes(after), random_inputs(before), kernels)


def test_a_head_of_the_prefill_graph_has_the_operators_of_the_page() -> None:
    model = parse(reference("reference_prefill_sha"))
    heads = 4
    assert kinds(model) == {
        "MUL": heads,
        "BATCH_MATMUL": 4 * heads,
        "CONCATENATION": heads + 1,
        "ADD": 2 * heads,
        "SOFTMAX": heads,
        "SLICE": 2 * heads,
        "SPLIT": 1,
        # Of the query and of the new values; of the query, the new keys and the joined heads.
        "TRANSPOSE": 2,
        "RESHAPE": 3,
    }


def test_a_head_of_the_unpacked_graph_has_the_operators_of_the_page() -> None:
    blocks, heads = 2, 4
    assert kinds(parse(reference("reference_add_sha"))) == {
        "UNPACK": 3 * blocks,
        "MUL": 2 * blocks * heads,
        "TRANSPOSE": blocks * heads,
        "BATCH_MATMUL": 2 * blocks * heads,
        "ADD": blocks * heads,
        "SOFTMAX": blocks * heads,
        "PACK": blocks,
    }


def test_one_scale_is_multiplied_into_each_head_and_the_unscaled_query_is_split() -> None:
    model = parse(reference("reference_prefill"))
    convert(model, "split")
    (split,) = [op for op in model.subgraphs[0].operators if op.name == "SPLIT"]
    assert split.input(1).shape == (1, 1, 512, 256)
    assert [op.name for op in split.outputs[0].consumers] == ["MUL"]
