"""Forms of the cut: where heads are split is a choice, what they compute is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from edge_opt.attention.form import FORM_NAMES, FORMS
from edge_opt.cli.app import FORMS as COMMAND_LINE_FORMS
from edge_opt.conversion import convert
from edge_opt.ir import Model
from edge_opt.ir.text import parse, to_text
from edge_opt.targets import load_target

TESTDATA = Path(__file__).parent.parent / "testdata"
MODELS = ["demo_gemma3.tflite", "demo_gemma3_a16w8.tflite"]


def converted(name: str, form: str) -> Model:
    result = convert(TESTDATA / name, dry_run=True, target=replace(load_target("generic"), form=form))
    assert result.model is not None
    assert len(result.converted) == 5
    assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
    return result.model


def test_the_command_line_knows_every_form() -> None:
    assert set(COMMAND_LINE_FORMS) == set(FORM_NAMES)


def sources_of_splits(model: Model) -> set[str]:
    """What makes the tensors that are split into heads."""
    found = set()
    for _, graph in model.entry_points():
        for operator in graph.operators:
            if operator.name in ("SPLIT", "UNPACK"):
                producer = operator.input(len(operator.inputs) - 1).producer
                found.add("input" if producer is None else producer.name)
    return found


@pytest.mark.parametrize("form", [*FORMS, "as-found"])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_is_proved_bit_for_bit(name: str, form: str) -> None:
    converted(name, form)


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_split_below_rope_by_default_and_at_their_projection_on_request(name: str) -> None:
    """RoPE ends in an ADD; above it stand the query's norm, a composite, and the query's projection."""
    assert sources_of_splits(converted(name, "split")) <= {"ADD", "RESHAPE"}
    assert sources_of_splits(converted(name, "split-above")) == {"FULLY_CONNECTED"}


KEYS_BATCHED = """
subgraph main (%q: float32[1,2,4,4], %k: float32[1,2,3,4], %v: float32[1,2,3,4]) {
  %q/head_0: float32[1,2,2,4], %q/head_1: float32[1,2,2,4] = SPLIT(int32(2), %q) {num_splits: 2}
  %l/head_0: float32[1,2,2,3] = BATCH_MATMUL(%q/head_0, %k) {adj_y: true}
  %p/head_0: float32[1,2,2,3] = SOFTMAX(%l/head_0) {beta: 1.0}
  %h/head_0: float32[1,2,2,4] = BATCH_MATMUL(%p/head_0, %v)
  %t/head_0: float32[1,2,2,4] = TRANSPOSE(%h/head_0, int32{0, 2, 1, 3})
  %l/head_1: float32[1,2,2,3] = BATCH_MATMUL(%q/head_1, %k) {adj_y: true}
  %p/head_1: float32[1,2,2,3] = SOFTMAX(%l/head_1) {beta: 1.0}
  %h/head_1: float32[1,2,2,4] = BATCH_MATMUL(%p/head_1, %v)
  %t/head_1: float32[1,2,2,4] = TRANSPOSE(%h/head_1, int32{0, 2, 1, 3})
  %out/heads: float32[1,2,2,8] = CONCATENATION(%t/head_0, %t/head_1) {axis: 3}
  %out: float32[1,2,16] = RESHAPE(%out/heads, int32{1, 2, 16}) {new_shape: [1, 2, 16]}
  return %out
}
"""


def test_key_heads_can_stay_a_batch_while_their_groups_are_split() -> None:
    """N = 4, K = 2, T = 2: two products of `[1, K, T, S]` instead of four of `[1, 1, T, S]`."""
    model = parse("""
    subgraph main (%q: float32[1,2,4,4], %k: float32[1,2,3,4], %v: float32[1,2,3,4]) {
      %l: float32[1,2,4,3] = BATCH_MATMUL(%q, %k) {adj_y: true}
      %p: float32[1,2,4,3] = SOFTMAX(%l) {beta: 1.0}
      %h: float32[1,2,4,4] = BATCH_MATMUL(%p, %v)
      %f: float32[1,4,2,4] = RESHAPE(%h, int32{1, 4, 2, 4}) {new_shape: [1, 4, 2, 4]}
      %t: float32[1,2,4,4] = TRANSPOSE(%f, int32{0, 2, 1, 3})
      %out: float32[1,2,16] = RESHAPE(%t, int32{1, 2, 16}) {new_shape: [1, 2, 16]}
      return %out
    }""")
    result = convert(model, form="split-keys-batched")
    assert result.model is not None
    assert to_text(result.model) == KEYS_BATCHED.lstrip()
    again = convert(result.model, form="split-keys-batched")
    assert [site.status for site in again.sites] == ["skipped"] * 2
    assert all("nothing to split while they stay a batch" in site.reason for site in again.sites)


@pytest.mark.parametrize("repeated", ["CONCATENATION(T, T) {axis: 1}", "TILE(T, int32{1, 2, 1, 1})"])
def test_key_heads_that_take_turns_cannot_stay_a_batch_and_that_is_told(repeated: str) -> None:
    """Heads 0 and 2 share keys here, so that those of a group do not lie side by side."""
    model = parse(f"""
    subgraph main (%q: float32[1,4,2,4], %k: float32[1,2,3,4], %v: float32[1,2,3,4]) {{
      %k4: float32[1,4,3,4] = {repeated.replace("T,", "%k,").replace("T)", "%k)")}
      %v4: float32[1,4,3,4] = {repeated.replace("T,", "%v,").replace("T)", "%v)")}
      %l: float32[1,4,2,3] = BATCH_MATMUL(%q, %k4) {{adj_y: true}}
      %p: float32[1,4,2,3] = SOFTMAX(%l) {{beta: 1.0}}
      %h: float32[1,4,2,4] = BATCH_MATMUL(%p, %v4)
      %t: float32[1,2,4,4] = TRANSPOSE(%h, int32{{0, 2, 1, 3}})
      %out: float32[1,2,16] = RESHAPE(%t, int32{{1, 2, 16}}) {{new_shape: [1, 2, 16]}}
      return %out
    }}""")
    result = convert(model, form="split-keys-batched")
    (site,) = result.converted
    assert (site.heads, site.kv_heads) == (4, 2)
    assert site.note.startswith("key/value heads are split too: the heads of a group do not lie side by side")
    assert result.model is not None
    products = [op for op in result.model.subgraphs[0].operators if op.name == "SOFTMAX"]
    assert [op.outputs[0].shape for op in products] == [(1, 1, 2, 3)] * 4


def test_slices_can_take_the_place_of_a_split() -> None:
    found = converted(MODELS[0], "slice")
    assert not any(
        operator.name == "SPLIT" for _, graph in found.entry_points() for operator in graph.operators
    )
