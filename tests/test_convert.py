"""The whole conversion on the demo models: what is rewritten, what stays, what is written when, and what is said."""

import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from ai_edge_litert.interpreter import Interpreter
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, written
from plain_tables import plain, values
from schema_models import unpack
from text_parser import parse

from edge_opt.base.errors import UsageError
from edge_opt.conversion import (
    ConversionResult,
    DifferenceFoundError,
    NothingMatchedError,
    SitesLeftError,
    convert,
    default_output,
)
from edge_opt.ir import Buffer, Metadata, Operator, load, save, to_bytes, to_tables
from edge_opt.ir.text import subgraph_text, to_text
from edge_opt.passes import Proof, Status, mha_to_sha
from edge_opt.passes.rewrite import Rewrite
from edge_opt.proof.regions import RegionProver
from edge_opt.schema import Data, read_model
from edge_opt.shapes import infer_shapes

TESTDATA = Path(__file__).parent.parent / "testdata"
DEMOS = [DEMO, QUANTIZED]
demos = pytest.mark.parametrize("path", DEMOS, ids=lambda path: path.stem)
Done = tuple[Path, ConversionResult]
# One head; its product is converted to another type, which no interpreter computes rightly in one step.
ILLEGAL = """\
signature main = #0 (a=%a, b=%b) -> (y=%y)
subgraph main (%a: int16[1,4,8] q(0.001, 0), %b: int16[1,8,8] q(0.001, 0)) {
  %p: int16[1,4,8] q(0.001, 0) = BATCH_MATMUL(%a, %b)
  %y: int8[1,4,8] q(0.01, 0) = QUANTIZE(%p)
  return %y
}
"""


@pytest.fixture(scope="module", params=DEMOS, ids=lambda path: path.stem)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A demo model, converted and fully verified once for the tests that only look."""
    path: Path = request.param
    output = tmp_path_factory.mktemp("converted") / path.name
    return path, convert(path, output, verify="full")


def tables(path: Any) -> Any:
    with read_model(path) as file:
        return values(file.root)


def output_of(result: ConversionResult) -> Path:
    assert result.output is not None
    return Path(result.output)


# What is rewritten


def test_every_block_is_converted_and_proved_bitwise(done: Done) -> None:
    _, result = done
    places = [("prefill_8", 0), ("prefill_8", 1), ("decode", 0), ("decode", 1), ("decode", 2)]
    assert [(site.signature, site.index) for site in result.sites] == places
    assert {(site.status, site.heads, site.kv_heads) for site in result.sites} == {(Status.CONVERTED, 4, 1)}
    assert all(site.proof is not None and not site.proof.steps for site in result.sites)
    blocks = [(found.name, found.blocks, found.blocks_converted) for found in result.signatures]
    assert blocks == [("prefill_8", 2, 2), ("decode", 3, 3)]
    for summary in result.signatures:
        assert summary.operators_after > summary.operators_before
        assert summary.largest_tensor_bytes_after <= summary.largest_tensor_bytes_before


def test_signatures_are_untouched_down_to_the_tensors(done: Done) -> None:
    path, result = done
    before, after = unpack(path.read_bytes()), unpack(output_of(result).read_bytes())
    assert len(before.signatureDefs) == len(after.signatureDefs) == 2
    for old, new in zip(before.signatureDefs, after.signatureDefs, strict=True):
        assert (old.signatureKey, old.subgraphIndex) == (new.signatureKey, new.subgraphIndex)
        for ours, theirs in ((old.inputs, new.inputs), (old.outputs, new.outputs)):
            assert [entry.name for entry in ours] == [entry.name for entry in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert argument(before, old, one) == argument(after, new, other)


def argument(model: Any, signature: Any, entry: Any) -> Any:
    tensor = model.subgraphs[signature.subgraphIndex].tensors[entry.tensorIndex]
    return plain([tensor.name, tensor.shape, tensor.shapeSignature, tensor.type, tensor.quantization])


def test_everything_else_in_the_file_is_untouched(done: Done) -> None:
    path, result = done
    before, after = unpack(path.read_bytes()), unpack(output_of(result).read_bytes())
    assert (before.version, before.description) == (after.version, after.description)
    assert len(before.subgraphs) == len(after.subgraphs)
    old, new = load(path), load(output_of(result))
    for index, (one, other) in enumerate(zip(old.subgraphs, new.subgraphs, strict=True)):
        assert one.name == other.name
        assert [tensor.name for tensor in one.inputs] == [tensor.name for tensor in other.inputs]
        assert [tensor.name for tensor in one.outputs] == [tensor.name for tensor in other.outputs]
        if index > 1:
            assert subgraph_text(one) == subgraph_text(other), "the bodies of composites"
    known, kept = (
        {e.name: bytes(e.buffer.data.view()) for e in model.metadata if e.buffer.data} for model in (old, new)
    )
    assert known == kept


def test_weights_are_where_they_were_and_there_once(done: Done) -> None:
    path, result = done
    with read_model(path) as old, read_model(output_of(result)) as new:
        before, after = (
            {bytes(b.get("data").view()) for b in f.root.get("buffers") if "data" in b.fields}
            for f in (old, new)
        )
        large = {data for data in before if len(data) > 512}
        assert large <= after
        assert {data for data in after if len(data) > 512} == large
        assert (old.flatbuffer_size == old.source.size) == (new.flatbuffer_size == new.source.size)
        assert new.source.size < old.source.size * 1.35


def test_operators_outside_the_blocks_are_the_same_in_the_same_order(done: Done) -> None:
    path, result = done
    for before, after in zip(load(path).subgraphs, load(output_of(result)).subgraphs, strict=True):
        kept = [op.outputs[0].name for op in before.operators]
        defined = {op.outputs[0].name for op in after.operators}
        survivors = [name for name in kept if name in defined]
        order = [op.outputs[0].name for op in after.operators if op.outputs[0].name in set(kept)]
        assert order == survivors
        assert len(kept) - len(survivors) < 60


def test_the_written_model_runs_its_shapes_can_be_derived_and_its_tensors_told_apart(done: Done) -> None:
    path = output_of(done[1])
    runtime = Interpreter(model_path=str(path))
    runtime.allocate_tensors()
    assert set(runtime.get_signature_list()) == {"prefill_8", "decode"}
    model = load(path)
    assert not infer_shapes(model)
    names = [tensor.name for graph in model.subgraphs for tensor in graph.tensors]
    assert len(set(names)) == len(names), "ai-edge-quantizer refuses a model where two have the same"


def test_no_operator_code_is_merely_listed(done: Done) -> None:
    _, result = done
    model = unpack(output_of(result).read_bytes())
    used = {op.opcodeIndex for graph in model.subgraphs for op in graph.operators}
    assert used == set(range(len(model.operatorCodes)))
    keys = [(code.builtinCode, code.version, code.customCode) for code in model.operatorCodes]
    assert len(set(keys)) == len(keys)


def test_nothing_is_left_that_only_the_old_blocks_needed(done: Done) -> None:
    path, result = done
    before, after = unpack(path.read_bytes()), unpack(output_of(result).read_bytes())
    for old, new in zip(before.subgraphs, after.subgraphs, strict=True):
        assert idle(new) <= idle(old)
    used = {t.buffer for graph in after.subgraphs for t in graph.tensors} | {e.buffer for e in after.metadata}
    idle_before = len(before.buffers) - len({t.buffer for graph in before.subgraphs for t in graph.tensors})
    assert len(after.buffers) - len(used) <= idle_before


def idle(graph: Any) -> set[str]:
    """Tensors that nobody reads or defines."""
    used = {int(i) for op in graph.operators for i in (*op.inputs, *op.outputs)}
    used |= {*graph.inputs, *graph.outputs}
    return {tensor.name for index, tensor in enumerate(graph.tensors) if index not in used}


def test_new_operators_have_the_versions_that_their_types_need(done: Done) -> None:
    path, result = done
    model = load(output_of(result))
    versions = {op.code.version for graph in model.subgraphs for op in graph.operators if op.name == "SPLIT"}
    assert versions == ({4} if "a16w8" in path.name else {1})


# Again, and the same


def test_a_converted_model_stays_as_it_is_and_says_so(done: Done, tmp_path: Path) -> None:
    _, first = done
    again = convert(output_of(first), tmp_path / "again.tflite")
    assert again.converted == []
    assert {site.reason for site in again.sites} == {"already single-head"}
    assert (
        again.summary() == "Every attention in the model is single-head already: there was nothing to split."
    )
    convert(output_of(first), dry_run=True, require_all=True, verify="none")
    assert all(site.settled for site in again.sites)
    assert tables(output_of(first)) == tables(tmp_path / "again.tflite")


@demos
def test_the_same_input_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    outputs = []
    for name in ("a.tflite", "b.tflite"):
        convert(path, tmp_path / name, verify="none")
        outputs.append((tmp_path / name).read_bytes())
    assert outputs[0] == outputs[1]


def test_a_model_without_attention_is_written_with_the_same_tables(tmp_path: Path) -> None:
    path = written(tmp_path, NO_ATTENTION, "plain.tflite")
    result = convert(path)
    assert result.output == str(tmp_path / "plain.opt.tflite")
    assert result.converted == []
    assert all(site.settled for site in result.sites)
    assert result.summary() == "The model holds no attention: there was nothing to split."
    assert tables(path) == tables(result.output)
    with pytest.raises(NothingMatchedError) as caught:
        convert(path, tmp_path / "not.tflite", require_match=True)
    assert caught.value.result.converted == []
    assert not (tmp_path / "not.tflite").exists()


def test_a_model_whose_sites_all_fail_is_written_with_the_same_tables(tmp_path: Path) -> None:
    """A target that refuses the operators that splitting needs."""
    target = tmp_path / "picky.toml"
    target.write_text('name = "picky"\nsummary = "x"\nrefused_operators = ["SPLIT"]\n')
    result = convert(DEMOS[0], tmp_path / "out.tflite", target=str(target))
    assert {site.status for site in result.sites} == {Status.ROLLED_BACK}
    assert {site.reason for site in result.sites} == {"target 'picky' does not take SPLIT"}
    assert tables(DEMOS[0]) == tables(tmp_path / "out.tflite")


# What is asked for


def test_from_bytes_the_model_is_returned() -> None:
    result = convert(DEMOS[0].read_bytes(), signatures=["decode"], verify="full")
    assert (result.input, result.output) == (None, None)
    assert result.model is not None
    assert len(list(result.model.subgraphs[1].operators)) > 145


def test_a_loaded_model_is_edited_in_place() -> None:
    model = load(DEMOS[0])
    result = convert(model, verify="none")
    assert result.model is model
    assert any(operator.name == "SPLIT" for operator in model.subgraphs[1].operators)


def test_the_result_says_everything_as_plain_data(done: Done) -> None:
    path, result = done
    data = result.to_dict()
    assert {*data} == {field.name for field in fields(result)} - {"model"} | {"masked_rows"}
    assert (data["input"], data["target"], data["verified"]) == (str(path), "generic", "full")
    assert [len(data[name]) for name in ("signatures", "sites")] == [2, 5]


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    convert(DEMOS[0], tmp_path / "o.tflite", verify="none", progress=lambda *step: told.append(step))
    for stage in ("rewriting", "writing"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize(
    ("source", "verify", "error"),
    [
        (DEMOS[0], "ful", "verification 'ful' does not exist, did you mean 'full'?"),
        (load(DEMOS[0]), "full", "give a path or bytes"),
    ],
)
def test_a_verification_that_cannot_be_done_is_refused_and_nothing_is_written(
    source: Any, verify: Any, error: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(error)):
        convert(source, tmp_path / "out.tflite", verify=verify)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_the_input_or_exists_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_opt.conversion.run.run_pass", lambda *_: pytest.fail("no work may be done"))
    path = tmp_path / "model.tflite"
    shutil.copy(DEMOS[0], path)
    for output in (path, default_output(path)):
        default_output(path).write_bytes(b"precious")
        with pytest.raises(UsageError):
            convert(path, output)
    assert default_output(path).read_bytes() == b"precious"


def test_the_default_output_lies_beside_the_input() -> None:
    assert default_output("a/b.c.tflite") == Path("a/b.c.opt.tflite")


def test_what_users_should_know_of_converted_sites_is_said_once(tmp_path: Path) -> None:
    text = (TESTDATA / "reference_select.txt").read_text()
    result = convert(to_bytes(parse(text)), tmp_path / "out.tflite", passes=["mask_to_add"], verify="none")
    assert len({site.note for site in result.converted}) == 1
    notes = [line for line in result.summary().splitlines() if "mask constant" in line]
    assert len(notes) == 1
    assert notes[0].startswith("  3 sites of mask_to_add: the mask constant -1e+09 becomes -1.26765e+30")


# Requirements


def test_require_all_where_a_site_is_left_writes_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, ILLEGAL, "illegal.tflite")
    with pytest.raises(
        SitesLeftError, match="matmul_convert site 0 of 'main': the product must write"
    ) as caught:
        convert(path, require_all=True)
    assert caught.value.exit_code == 1
    assert [site.status for site in caught.value.result.sites] == [Status.SKIPPED]
    assert [file.name for file in tmp_path.iterdir()] == ["illegal.tflite"]
    assert convert(path, dry_run=True).sites[0].status is Status.SKIPPED


def test_a_model_is_what_it_was_where_it_is_refused() -> None:
    model = load(DEMO)
    before = to_text(model)
    with pytest.raises(NothingMatchedError):
        convert(model, passes="mask_to_add", extract_signature="decode", require_match=True)
    assert to_text(model) == before
    assert len(model.signatures) == 2


def test_a_model_is_what_it_was_after_an_interrupt_which_carries_what_was_done() -> None:
    model = load(DEMO)
    before = to_text(model)

    def interrupt(_: str, done: int, __: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        convert(model, verify="none", progress=interrupt)
    assert to_text(model) == before
    result: ConversionResult = caught.value.result  # type: ignore[attr-defined]
    assert [site.status for site in result.sites] == [Status.CONVERTED] * 2
    assert result.failure == "interrupted"


# What cannot be rewritten


def test_control_dependencies_freeze_the_model_and_are_the_reason(tmp_path: Path) -> None:
    model = load(DEMOS[0])
    model.metadata.append(Metadata("model_control_dependencies", Buffer(Data(bytes(8)))))
    path = tmp_path / "frozen.tflite"
    save(model, path)
    result = convert(path)
    assert {site.status for site in result.sites} == {Status.SKIPPED}
    assert all("model_control_dependencies" in site.reason for site in result.sites)
    assert result.output is not None
    assert tables(path) == tables(result.output)


def test_a_newer_operator_raises_the_models_minimum_runtime(tmp_path: Path) -> None:
    model = load(DEMOS[1])
    for entry in model.metadata:
        if entry.name == "min_runtime_version":
            entry.buffer = Buffer(Data(b"1.5.0".ljust(16, b"\0")))
    path = tmp_path / "old.tflite"
    save(model, path)
    result = convert(path, verify="none")
    assert result.output is not None
    found = {e.name: e.buffer.data for e in load(result.output).metadata}["min_runtime_version"]
    assert found is not None
    assert bytes(found.view()) == b"2.3.0".ljust(16, b"\0"), "SPLIT of int16 is version 4"


# Full verification


def swapped_heads(build: Callable[..., Any]) -> Callable[..., Any]:
    """Corrupts a rewrite: the heads are joined in another order."""

    def made(*arguments: Any) -> Any:
        rewrite = build(*arguments)
        assert isinstance(rewrite, Rewrite)
        new = list(rewrite.new)
        at = max(i for i, op in enumerate(new) if op.name == "CONCATENATION" and len(op.inputs) == 4)
        join = new[at]
        new[at] = Operator(join.code, join.inputs[::-1], join.outputs, join.options)
        return replace(rewrite, new=tuple(new))

    return made


def test_the_proof_rolls_a_corrupt_rewrite_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mha_to_sha, "_build", swapped_heads(mha_to_sha._build))
    result = convert(DEMOS[0], tmp_path / "out.tflite", signatures=["decode"])
    assert {site.status for site in result.sites} == {Status.ROLLED_BACK}
    assert all("the new region differs" in site.reason for site in result.sites)
    assert tables(DEMOS[0]) == tables(tmp_path / "out.tflite")


def test_full_verification_finds_what_a_broken_proof_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believe(self: RegionProver, rewrite: Rewrite, demand: Any) -> Any:
        return Proof(demand, holds=True, bitwise=True, max_abs=0.0)

    monkeypatch.setattr(mha_to_sha, "_build", swapped_heads(mha_to_sha._build))
    monkeypatch.setattr(RegionProver, "prove", believe)
    with pytest.raises(DifferenceFoundError, match="nothing was written") as caught:
        convert(DEMOS[0], tmp_path / "out.tflite", signatures=["decode"], verify="full")
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    told = caught.value.result.to_dict()
    assert (told["output"], told["failure"]) == (None, str(caught.value))
    assert len(told["sites"]) == 3
    assert [each["holds"] for each in told["whole"]] == [True, False]


def test_in_memory_and_on_disk_give_the_same_model(done: Done) -> None:
    path, result = done
    model = load(path)
    convert(model, verify="none")
    assert to_bytes(model) == output_of(result).read_bytes()
    assert to_text(load(to_bytes(model))) == to_text(model)
    assert values(to_tables(model)) == tables(to_bytes(model))
