"""unread_caches: a cache that no operator of the prefill reads gets the type that decode reads it as."""

from pathlib import Path

import fuzz
import pytest
from bundles import bundle, model_part
from pass_runs import changed, sites_of

import edge_opt
from edge_opt.comparison.golden import check, record
from edge_opt.inspection.report import conversion_report
from edge_opt.ir import DType, Model, Tensor, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes.unread_caches import unread_caches

LAST_LAYER = """
signature prefill_4 = #0 (x=%x, kv_cache_k_0=%k, kv_cache_v_0=%v) -> (kv_slice_k_0=%new, y=%y)
signature decode = #1 (x=%x, kv_cache_k_0=%k, kv_cache_v_0=%v) -> (kv_slice_k_0=%new, y=%y)
subgraph prefill_4 (%x: int16[1,1,4,2] q(0.01, 0), %k: float32[1,1,2,8], %v: float32[1,1,8,2]) {
  %new: int16[1,1,2,4] q(0.01, 0) = TRANSPOSE(%x, int32{0, 1, 3, 2})
  %y: int16[1,1,4,2] q(0.01, 0) = NEG(%x)
  return %new, %y
}
subgraph decode (%x: int16[1,1,1,2] q(0.01, 0), %k: int16[1,1,2,8] q(0.001, 0), %v: int16[1,1,8,2] q(0.002, 0)) {
  %new: int16[1,1,2,1] q(0.01, 0) = TRANSPOSE(%x, int32{0, 1, 3, 2})
  %p: int16[1,1,1,8] q(0.01, 0) = BATCH_MATMUL(%x, %k)
  %y: int16[1,1,1,2] q(0.01, 0) = BATCH_MATMUL(%p, %v)
  return %new, %y
}
"""
"""The last layer of a split export for NPUs, as ai-edge-quantizer leaves it."""


def types(model: Model) -> list[str]:
    """Those of the prefill's caches."""
    return [tensor.dtype.name for tensor in [*model.signatures["prefill_4"].inputs.values()][1:]]


@pytest.mark.parametrize("signatures", [None, "prefill_4"])
def test_an_unread_cache_gets_type_and_scale_of_decodes(signatures: str | None) -> None:
    """Decode gives the type even if it is not to be rewritten itself."""
    before = to_bytes(parse(LAST_LAYER))
    result = edge_opt.convert(before, verify="full", signatures=signatures)
    first, second = (result.model.signatures[key].inputs for key in ("prefill_4", "decode"))
    for name in ("kv_cache_k_0", "kv_cache_v_0"):
        kinds = [
            (tensor.dtype, tensor.quantization.key()) for tensor in (first[name], second[name])
        ]  # type: ignore[union-attr]
        assert kinds[0] == kinds[1]
    assert [(site.pass_name, site.signature, site.operator) for site in result.sites] == [
        ("unread_caches", "prefill_4", name) for name in "kv"
    ]
    told = "input 'kv_cache_k_0' was FLOAT32 and is INT16 now, so callers must pass that"
    notes = (
        str(result.to_dict()["sites"][0]["note"]),
        result.summary(),
        conversion_report(result).render(".md"),
    )
    assert all(told in text.replace("\\", "") for text in notes)
    assert result.whole
    after = to_bytes(result.model)
    assert edge_opt.convert(after).sites == [], "once is enough"


def test_an_unread_cache_inside_a_bundle_gets_it_too(tmp_path: Path) -> None:
    path, after = tmp_path / "m.litertlm", tmp_path / "m.opt.litertlm"
    path.write_bytes(bundle([model_part("prefill_decode", to_bytes(parse(LAST_LAYER)))]))
    assert edge_opt.convert(path).output == str(after)
    assert types(edge_opt.load(after, model="prefill_decode")) == ["INT16"] * 2
    assert [site.pass_name for site in edge_opt.inspect(path).sites] == ["unread_caches"] * 2
    assert edge_opt.inspect(after).sites == []


OTHERS = {
    "read": ": float32[1,1,8,2]) { -> : float32[1,1,8,2]) {\n"
            "  %r: float32[1,1,2,8] = NEG(%k)\n  %s: float32[1,1,8,2] = NEG(%v)",
    "an output": "return %new, %y\n}\nsubgraph decode -> return %new, %y, %k, %v\n}\nsubgraph decode",
    "another shape": "%k: float32[1,1,2,8], %v: float32[1,1,8,2] -> %k: float32[1,1,2,9], %v: float32[1,1,9,2]",
    "another name": "#0 (x=%x, kv_cache_k_0=%k, kv_cache_v_0=%v -> #0 (x=%x, kv_cache_k_1=%k, kv_cache_v_1=%v",
    "no cache": "kv_cache -> kv",
    "equal types": "float32[1,1,2,8], %v: float32[1,1,8,2] -> "
                   "int16[1,1,2,8] q(0.001, 0), %v: int16[1,1,8,2] q(0.002, 0)",
    "read by nobody": "BATCH_MATMUL(%x, %k)\n  %y: int16[1,1,1,2] q(0.01, 0) = BATCH_MATMUL(%p, %v) -> "
                      "BATCH_MATMUL(%x, int16[2,8]{splat 1} q(0.01, 0))\n  %y: int16[1,1,1,2] q(0.01, 0) = NEG(%x)",
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_inputs_keep_their_types(case: str) -> None:
    model = parse(changed(LAST_LAYER, OTHERS[case]))
    before = types(model)
    result = edge_opt.convert(model, verify="none")
    assert [site for site in result.sites if site.pass_name == "unread_caches"] == []
    assert types(model) == before


def test_integers_without_a_scale_are_no_cache_whatever_their_names() -> None:
    text = LAST_LAYER.replace("kv_cache_k_0", "cache_position").replace(
        "%k: float32[1,1,2,8]", "%k: int32[1,1,2,8]"
    )
    text = text.replace("%k: int16[1,1,2,8] q(0.001, 0)", "%k: int64[1,1,2,8]")
    model = parse(
        text.replace("BATCH_MATMUL(%x, %k)", "CAST(%k)").replace(
            "%p: int16[1,1,1,8] q", "%p: int16[1,1,2,8] q"
        )
    )
    edge_opt.convert(model, verify="none")
    assert types(model) == ["INT32", "INT16"]


def test_signatures_that_are_not_chosen_keep_their_types() -> None:
    model = parse(LAST_LAYER)
    assert edge_opt.convert(model, signatures="decode", verify="none").sites == []
    assert types(model) == ["FLOAT32"] * 2


@pytest.mark.parametrize("chosen", [None, "prefill_4"])
def test_signatures_of_one_subgraph_are_both_told(chosen: str | None) -> None:
    second = LAST_LAYER.splitlines()[1].replace("prefill_4 = #0", "prefill_too = #0")
    sites = sites_of(f"{second}\n{LAST_LAYER}", signatures=chosen)
    assert [site.signature for site in sites] == [
        "prefill_too",
        "prefill_too",
        "prefill_4",
        "prefill_4",
    ]
    assert all("was FLOAT32 and is INT16 now" in site.note for site in sites)


def test_readers_that_disagree_decide_nothing() -> None:
    other = LAST_LAYER[LAST_LAYER.index("subgraph decode") :].replace("decode", "third")
    other = other.replace("0.001", "0.003")
    signature = LAST_LAYER.splitlines()[2].replace("decode = #1", "third = #2")
    model = parse(f"{LAST_LAYER}{other}{signature}\n")
    edge_opt.convert(model, verify="none")
    assert types(model) == ["FLOAT32", "INT16"]


def test_a_scale_alone_may_differ() -> None:
    text = LAST_LAYER.replace("%k: float32[1,1,2,8]", "%k: int16[1,1,2,8] q(0.5, 0)")
    (site, _) = edge_opt.convert(parse(text)).sites
    assert "was INT16 and is INT16 with another scale now" in site.note


def test_callers_are_told_of_the_type_and_golden_files_hold(tmp_path: Path) -> None:
    before, after = tmp_path / "before.tflite", tmp_path / "after.tflite"
    before.write_bytes(to_bytes(parse(LAST_LAYER)))
    edge_opt.convert(before, after)
    report = edge_opt.compare(before, after)
    assert report.bitwise
    told = "2 arguments with another type in b (first: prefill_4/kv_cache_k_0, "
    assert f"{told}float32 in a, int16 in b); inputs get the same real numbers" in report.notes()
    record(before, tmp_path / "golden.npz")
    assert check(after, tmp_path / "golden.npz").bitwise


def test_thousands_of_unread_caches_take_a_second() -> None:
    """A file of a megabyte may name that many."""
    model = parse(LAST_LAYER)
    signature = model.signatures["prefill_4"]
    for number in range(5000):
        tensor = signature.subgraph.add_tensor(Tensor(f"{number}", (1,), DType.FLOAT32))
        signature.inputs[f"cache_{number}"] = tensor
    with fuzz.time_limit():
        assert [name for _, name, *_ in unread_caches(model)] == ["kv_cache_k_0", "kv_cache_v_0"]
