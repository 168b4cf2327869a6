"""The whole conversion on the demo models: what is rewritten, what stays, what is written when, and what is said."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from ai_edge_litert.interpreter import Interpreter
from cli_runs import DEMO, NO_ATTENTION, QUANTIZED, Patch, written
from pass_runs import SELECT_PAGE, sites_of
from schema_models import plain, unpack, values
from toy_passes import CHAIN, Double

from edge_opt.base.errors import OutputError, UsageError
from edge_opt.conversion import ConversionResult, SitesSkippedError, convert
from edge_opt.conversion.result import check_requirements, entry_point_table
from edge_opt.conversion.run import default_output
from edge_opt.inspection import inspect
from edge_opt.ir import Buffer, Metadata, Model, cleanup, load, save, to_bytes, to_tables
from edge_opt.ir.parse import parse
from edge_opt.ir.text import subgraph_text
from edge_opt.passes import (
    PASSES,
    Context,
    Exact,
    Proof,
    Status,
    Steps,
    Verdict,
    Within,
    mha_to_sha,
)
from edge_opt.schema import Data, read_model
from edge_opt.shapes import infer_shapes
from edge_opt.targets import Target, load_target
from edge_opt.verification.audit import UnverifiedChangeError
from edge_opt.verification.verdict import Ran

DEMOS = [DEMO, QUANTIZED]
Done = tuple[Path, ConversionResult]


@pytest.fixture(scope="module", params=DEMOS, ids=lambda path: path.stem)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A demo model, converted and fully verified once for the tests that only look."""
    path: Path = request.param
    output = tmp_path_factory.mktemp("converted") / path.name
    return path, convert(path, output, verify="full")


def tables(path: Any) -> Any:
    return values(read_model(path))


def output_of(result: ConversionResult) -> Path:
    return Path(result.output)


def test_every_block_is_converted_and_verified_bitwise(done: Done) -> None:
    _, result = done
    places = [("prefill_8", 0), ("prefill_8", 1), ("decode", 0), ("decode", 1), ("decode", 2)]
    assert [(site.signature, site.index) for site in result.converted] == places
    assert {(site.heads, site.kv_heads) for site in result.converted} == {(4, 1)}
    assert all(site.proof is not None and not site.proof.steps for site in result.converted)
    blocks = [(found.name, found.blocks, found.blocks_converted) for found in result.signatures]
    assert blocks == [("prefill_8", 2, 2), ("decode", 3, 3)]
    for summary in result.signatures:
        assert summary.operators_after > summary.operators_before
        assert summary.largest_tensor_bytes_after <= summary.largest_tensor_bytes_before
    for name, graph in load(output_of(result)).entry_points():
        rows = {one.outputs[0].shape[:-1] for one in graph.operators if one.name == "SOFTMAX"}
        assert rows == {(1, 1, 8 if name == "prefill_8" else 1)}, (
            "whatever works on logits holds one head"
        )


def test_everything_else_in_the_file_is_untouched(done: Done) -> None:
    path, result = done
    before, after = unpack(path.read_bytes()), unpack(output_of(result).read_bytes())
    assert (before.version, before.description) == (after.version, after.description)
    retyped = [site.operator.encode() for site in result.sites if site.pass_name == "unread_caches"]
    assert len(retyped) == (2 if path == QUANTIZED else 0)
    kept = [
        [one for one in _arguments(model) if one[0] not in retyped] for model in (before, after)
    ]
    assert kept[0] == kept[1]
    old, new = load(path), load(output_of(result))
    for index, (one, other) in enumerate(zip(old.subgraphs, new.subgraphs, strict=True)):
        names = [
            [tensor.name for tensor in (*graph.inputs, *graph.outputs)] for graph in (one, other)
        ]
        assert (one.name, names[0]) == (other.name, names[1])
        if index > 1:
            assert subgraph_text(one) == subgraph_text(other), "the bodies of composites"
        kept = [op.outputs[0].name for op in one.operators]
        after_it = [op.outputs[0].name for op in other.operators]
        survivors = [name for name in kept if name in set(after_it)]
        assert [name for name in after_it if name in set(kept)] == survivors
        assert len(kept) - len(survivors) < 60
    metadata = ([entry for entry in model.metadata if entry.buffer.data] for model in (old, new))
    known, left = ({e.name: bytes(e.buffer.data.view()) for e in entries} for entries in metadata)
    assert left == {**known, "edge-opt target": b"generic"}


def _arguments(model: Any) -> Iterator[Any]:
    """Every signature with its arguments, down to their tensors."""
    for signature in model.signatureDefs:
        tensors = model.subgraphs[signature.subgraphIndex].tensors
        yield [signature.signatureKey]
        for entry in (*signature.inputs, *signature.outputs):
            tensor = tensors[entry.tensorIndex]
            facts = [tensor.shape, tensor.shapeSignature, tensor.type, tensor.quantization]
            yield plain([tensor.name, entry.name, *facts])


def test_weights_are_where_they_were_and_there_once(done: Done) -> None:
    path, result = done
    buffers = (read_model(one).get("buffers") for one in (path, output_of(result)))
    old, new = ([b.fields["data"] for b in each if "data" in b.fields] for each in buffers)
    before, after = (
        {bytes(data.view()) for data in some if data.length > 512} for some in (old, new)
    )
    assert before == after
    assert {data.external for data in old} == {data.external for data in new}
    assert output_of(result).stat().st_size < path.stat().st_size * 1.35


def test_the_written_model_runs_and_lists_nothing_that_is_not_used(done: Done) -> None:
    path, result = done
    output = output_of(result)
    runtime = Interpreter(model_path=str(output))
    runtime.allocate_tensors()
    assert set(runtime.get_signature_list()) == {"prefill_8", "decode"}
    model = load(output)
    assert not infer_shapes(model)
    names = [tensor.name for graph in model.subgraphs for tensor in graph.tensors]
    assert len(set(names)) == len(names), (
        "ai-edge-quantizer refuses a model where two have the same"
    )
    versions = {
        op.code.version for graph in model.subgraphs for op in graph.operators if op.name == "SPLIT"
    }
    assert versions == ({4} if path == QUANTIZED else {1}), "those that their types need"
    before, after = unpack(path.read_bytes()), unpack(output.read_bytes())
    used = {op.opcodeIndex for graph in after.subgraphs for op in graph.operators}
    assert used == set(range(len(after.operatorCodes)))
    for old, new in zip(before.subgraphs, after.subgraphs, strict=True):
        assert _idle(new) <= _idle(old)


def _idle(graph: Any) -> set[str]:
    """Tensors that nobody reads or defines."""
    used = {int(i) for op in graph.operators for i in (*op.inputs, *op.outputs)}
    used |= {*graph.inputs, *graph.outputs}
    return {tensor.name for index, tensor in enumerate(graph.tensors) if index not in used}


def test_in_memory_and_on_disk_give_the_same_model(done: Done) -> None:
    path, result = done
    model = load(path)
    assert convert(model, verify="none").model is model, "it is edited in place"
    assert to_bytes(model) == output_of(result).read_bytes()
    assert values(to_tables(model)) == tables(to_bytes(model))


def test_a_converted_model_stays_as_it_is_and_says_so(done: Done, tmp_path: Path) -> None:
    _, first = done
    again = convert(output_of(first), tmp_path / "again.tflite", require_all=True)
    assert {(site.why, site.status) for site in again.sites} == {("single-head", "nothing to do")}
    said = "Every attention in the model is single-head already: there was nothing to split."
    assert again.summary() == said
    assert tables(output_of(first)) == tables(tmp_path / "again.tflite")


def frozen(folder: Path) -> Path:
    model = load(DEMO)
    model.metadata.append(Metadata("model_control_dependencies", Buffer(Data(bytes(8)))))
    save(model, folder / "frozen.tflite")
    return folder / "frozen.tflite"


NO_SPLIT = replace(
    load_target("generic"), name="picky", refused_operators=frozenset({"SPLIT", "UNPACK"})
)
UNCHANGED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "no attention": (
        lambda folder: written(folder, NO_ATTENTION),
        "nothing to do",
        "not-attention",
    ),
    "all sites fail": (lambda _: DEMO, "reverted", "target"),
    "control dependencies": (frozen, "skipped", "fixed-order"),
}


@pytest.mark.parametrize(("make", "status", "why"), UNCHANGED.values(), ids=UNCHANGED)
def test_a_model_without_a_rewrite_is_written_with_the_same_tables(
    make: Callable[[Path], Path], status: str, why: str, tmp_path: Path
) -> None:
    source, output = make(tmp_path), tmp_path / "out.tflite"
    settled = status == "nothing to do"
    result = convert(source, output, target=NO_SPLIT, require_all=settled)
    assert {(site.status, site.why) for site in result.sites} == {(status, why)}
    nothing = result.summary() == (
        "No attention was found, or mha_to_sha was skipped: nothing was split."
    )
    assert nothing is settled
    assert tables(source) == tables(output)


def test_from_bytes_the_model_is_returned_or_exported(tmp_path: Path) -> None:
    result = convert(DEMO.read_bytes(), signatures=["decode"], verify="full")
    assert (result.input, result.output) == (None, None)
    assert len(list(result.model.subgraphs[1].operators)) > 145
    assert subgraph_text(result.model.subgraphs[0]) == subgraph_text(load(DEMO).subgraphs[0])
    result.export(tmp_path / "out.tflite")
    assert (tmp_path / "out.tflite").read_bytes() == to_bytes(result.model)
    with pytest.raises(UsageError, match="there is no exported model"):
        assert result.exported
    with pytest.raises(UsageError, match="give a path or bytes"):
        convert(load(DEMO), verify="full")


def test_a_signature_that_was_not_chosen_is_not_said_to_have_no_blocks() -> None:
    result = convert(DEMO.read_bytes(), signatures=["decode"], verify="none")
    rows = {name: blocks for name, _, blocks, _ in entry_point_table(result)}
    assert rows == {"signature": "blocks split", "prefill_8": "not chosen", "decode": "3 of 3"}


def test_the_result_says_everything_as_plain_data(done: Done) -> None:
    path, result = done
    data = result.to_dict()
    assert {*data} == {field.name for field in fields(result)} - {"model", "given"}
    assert (data["input"], data["target"], data["verified"]) == (str(path), "generic", "full")
    assert [len(data[name]) for name in ("signatures", "sites")] == [2, len(result.sites)]


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    convert(DEMO, tmp_path / "o.tflite", verify="none", progress=lambda *step: told.append(step))
    for stage in ("rewriting", "writing"):
        steps = [(done, total) for name, done, total in told if name == stage]
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1]


def test_an_output_that_exists_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "edge_opt.conversion.run.run_pass", lambda *_: pytest.fail("no work may be done")
    )
    path = tmp_path / "model.tflite"
    shutil.copy(DEMO, path)
    assert default_output("a/b.c.tflite") == Path("a/b.c.opt.tflite")
    default_output(path).write_bytes(b"precious")
    with pytest.raises(UsageError, match="is the input itself"):
        convert(path, path, overwrite=True)
    with pytest.raises(UsageError, match="exists"):
        convert(path)
    assert default_output(path).read_bytes() == b"precious"


def test_sites_of_a_pass_with_the_same_outcome_share_a_line_skipped_ones_first(
    tmp_path: Path,
) -> None:
    target = tmp_path / "mine.toml"
    target.write_text('name = "mine"\nsummary = "x"\nsplit_signatures = ["other"]\n')
    result = convert(to_bytes(parse(SELECT_PAGE)), target=str(target))
    _, skipped, *converted = result.summary().splitlines()
    assert skipped.startswith(
        "  3 attention blocks: nothing to do (main#0, main#1, main#2): target 'mine' gains nothing"
    )
    assert converted[0].startswith(
        "  mask_to_add: 3 converted (main#0, main#1, main#2): the mask constant"
    )


def test_blocks_that_the_target_declines_are_counted_and_printed_and_pass_the_gate() -> None:
    target = Target("mine", "", split_signatures=("other",))
    result = convert(
        parse(SELECT_PAGE), target=target, skip="mask_to_add", verify="none", require_all=True
    )
    headline, line = result.summary().splitlines()
    assert (
        headline
        == "Target 'mine' gains nothing from splitting 3 attention blocks: nothing was split."
    )
    assert line.startswith("  3 attention blocks: nothing to do (main#0, main#1, main#2): target")


def verdict(status: Status, name: str = "mha_to_sha", proof: Proof | None = None) -> Verdict:
    return Verdict(name, "main", 0, "p", status, proof=proof, added=1)


@pytest.mark.parametrize(
    ("kernels", "where"), [("reference", " on the reference kernels"), ("xnnpack", "")]
)
def test_the_headline_names_the_reference_kernels_only_where_they_ran(
    kernels: str, where: str
) -> None:
    proof = Proof(
        Exact(), holds=True, bitwise=False, max_abs=0.0, note="a note", ran=(Ran(kernels),)
    )
    sites = [verdict(Status.CONVERTED, proof=proof)]
    said = ConversionResult(None, None, "generic", "regions", sites=sites).summary().splitlines()[0]
    assert f"bit-identical (1 run){where}; a note" in said


def test_the_headline_has_the_largest_difference_and_how_to_leave_out_one_of_rounding() -> None:
    for check, remedy in (
        (Within(0.1), ""),
        (Steps(2), " (--skip balanced_norms leaves it out)"),
    ):
        proofs = [Proof(check, holds=True, bitwise=False, max_abs=by) for by in (0.5, 0.25)]
        sites = [verdict(Status.CONVERTED, "balanced_norms", proof) for proof in proofs]
        result = ConversionResult(None, None, "generic", "regions", sites=sites)
        said = result.summary().splitlines()[0]
        figure = f"largest difference 0.5, by balanced_norms{remedy}."
        assert said.endswith(f"of each pass (2 run): {figure}")


def test_one_unverified_site_among_converted_ones_is_no_error() -> None:
    proof = Proof(
        Exact(), holds=False, bitwise=False, max_abs=0, reason="no time", is_inconclusive=True
    )
    result = ConversionResult(
        None, None, "generic", "regions", sites=[verdict(Status.SKIPPED, proof=proof)]
    )
    with pytest.raises(SitesSkippedError):
        check_requirements(result, require_all=False)
    result.sites.append(verdict(Status.CONVERTED))
    check_requirements(result, require_all=False)


@pytest.mark.parametrize("ends", [SitesSkippedError, KeyboardInterrupt])
def test_a_model_is_what_it_was_where_a_conversion_ends(ends: type[BaseException]) -> None:
    model = load(DEMO)
    before = to_bytes(model)

    def interrupt(_: str, done: int, __: int) -> None:
        if done == 2 and ends is KeyboardInterrupt:
            raise KeyboardInterrupt

    refused = ("SPLIT", "UNPACK") if ends is SitesSkippedError else ()
    target = replace(load_target("generic"), refused_operators=refused)
    with pytest.raises(ends) as caught:
        convert(model, verify="none", progress=interrupt, target=target, require_all=True)
    assert to_bytes(model) == before
    result: ConversionResult = caught.value.result  # type: ignore[attr-defined]
    assert not result
    assert len(result.sites) == (5 if ends is SitesSkippedError else 2)


def _another_code(model: Model) -> None:
    graph = model.signatures["prefill_8"].subgraph
    product = next(op for op in graph.operators if op.name == "MUL")
    product.code = model.operator_code("ADD", product.code.version)


UNREAD = "kv_cache_k_2"
AFTERWARDS: dict[str, tuple[Callable[[Model], object], str]] = {
    "an entry point that is not rewritten": (_another_code, "the operator ADD"),
    "an unread input": (
        lambda model: setattr(model.signatures["prefill_8"].inputs[UNREAD], "shape", (1, 1)), "inputs, outputs"
    ),
    "metadata": (lambda model: model.metadata.pop(), "inputs, outputs, signatures or metadata"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "found"), AFTERWARDS.values(), ids=AFTERWARDS)
def test_what_changes_after_the_verification_is_noticed(
    spoil: Callable[[Model], object], found: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cleanup, "name_apart", lambda model, _: spoil(model))
    with pytest.raises(UnverifiedChangeError, match=f"outside the verified rewrites: {found}"):
        convert(DEMO, tmp_path / "out.tflite", verify="none", signatures=["decode"])
    assert list(tmp_path.iterdir()) == []


def run_by(text: str, passes: Any, **options: Any) -> list[str]:
    """The passes that had sites, in their order."""
    return list(dict.fromkeys(one.pass_name for one in sites_of(text, passes=passes, **options)))


def test_passes_run_in_the_given_order_by_name_or_as_objects() -> None:
    both = ["mha_to_sha", "mask_to_add"]
    assert run_by(SELECT_PAGE, [PASSES[both[0]], both[1], Double()]) == both
    assert run_by(SELECT_PAGE, both[1]) == [both[1]]
    assert run_by(SELECT_PAGE, []) == []
    assert run_by(CHAIN, (one for one in [Double()]), skip="mha_to_sha") == ["double"]
    assert run_by(CHAIN, [Double()], skip="double") == []
    for wrong, said in (("mask_to_ad", "mask_to_add"), (Double, "is not a pass: give a name")):
        with pytest.raises(UsageError, match=said):
            run_by(CHAIN, [wrong])


def test_a_subclass_of_another_name_is_searched_for_what_it_left(monkeypatch: Patch) -> None:
    class Own(mha_to_sha.MhaToSha):
        name = "own"

    def found(_: Context, verdicts: list[Verdict], __: object) -> list[Verdict]:
        return [replace(verdicts[0], status=Status.SKIPPED, operator="left")]

    monkeypatch.setattr("edge_opt.conversion.run.left_over", found)
    last = sites_of(SELECT_PAGE, passes=["mask_to_add", Own()])[-1]
    assert (last.pass_name, last.operator) == ("own", "left")


def test_a_folder_gets_the_text_before_and_after_each_pass_that_changed_something(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "texts"
    model = parse(SELECT_PAGE)
    before = subgraph_text(model.subgraphs[0])
    convert(model, dump=folder, verify="none")
    names = ["000-main-input.txt", "001-main-mask_to_add.txt", "002-main-mha_to_sha.txt"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / names[0]).read_text() == before
    assert (folder / names[-1]).read_text() == subgraph_text(model.subgraphs[0])
    with pytest.raises(UsageError, match="is not empty: give a new one"):
        convert(parse(SELECT_PAGE), dump=folder)
    with pytest.raises(OutputError, match="choose another"):
        convert(parse(SELECT_PAGE), dump=folder / names[0])
    with pytest.raises(OutputError, match="choose another"):
        convert(parse(SELECT_PAGE), dump=folder / names[0] / "below")


def test_a_conversion_that_is_refused_makes_no_folder_of_texts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        convert(DEMO, signatures="none", dump=tmp_path / "texts", dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(UsageError, match="an output is an empty path: give a name"):
        convert(DEMO, "")


def test_names_of_signatures_and_passes_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    class Hostile(Double):
        name = "a/../../double"

    text = "signature '../../run' = #0 (x=%x, o=%o) -> (y=%y, other=%other)\n" + CHAIN
    convert(parse(text), passes=[Hostile()], verify="none", dump=tmp_path / "texts")
    names = sorted(path.name for path in (tmp_path / "texts").iterdir())
    assert names == ["000-.._.._run-input.txt", "001-.._.._run-a_.._.._double.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_what_was_converted_for_another_target_is_refused_and_asks_for_the_original(
    tmp_path: Path,
) -> None:
    done = tmp_path / "generic.tflite"
    convert(DEMO, done, verify="none")
    with pytest.raises(UsageError, match=r"converted for target 'generic'.*give the original file"):
        convert(done, tmp_path / "chip.tflite", target="SM8750", verify="none")
    (note,) = convert(done, target="SM8750", verify="none", dry_run=True).notes
    assert note in inspect(done, target="SM8750").notes
    assert convert(done, tmp_path / "again.tflite", verify="none").notes == []
