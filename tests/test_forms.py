"""Forms of the cut: where heads are split is a choice, what they compute is not."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from edge_opt.attention.block import FORMS
from edge_opt.conversion import convert
from edge_opt.ir import Model
from edge_opt.targets import load_target

TESTDATA = Path(__file__).parent.parent / "testdata"
MODELS = ["demo_gemma3.tflite", "demo_gemma3_a16w8.tflite"]


@cache
def converted(name: str, form: str) -> Model:
    result = convert(TESTDATA / name, dry_run=True, target=replace(load_target("generic"), form=form))
    assert result.model is not None
    assert len(result.converted) == 5
    assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
    return result.model


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


def test_small_heads_are_cut_below_their_norm_where_the_target_wants_it() -> None:
    """The heads of this model have H = 16."""
    target = replace(load_target("generic"), form="split-above")
    for least, cut_at in ((17, "STABLEHLO_COMPOSITE"), (16, "FULLY_CONNECTED")):
        result = convert(TESTDATA / MODELS[0], dry_run=True, target=replace(target, norm_per_head_from=least))
        assert all(site.proof is not None and site.proof.bitwise for site in result.converted)
        assert result.model is not None
        assert sources_of_splits(result.model) == {cut_at}
