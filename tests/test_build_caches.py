"""Caches of a build: how long the rings of sliding layers are, what is refused, and what a bundle says of them."""

from pathlib import Path
from typing import Any

import pytest
from bundles import bundle, model_part
from cli_runs import Captured, run
from litert_lm_builder.runtime.proto import executor_metadata_pb2
from pretend_stages import TOKENIZER

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.building.rings import plan_caches
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.schema.litertlm import read_bundle, read_executor_metadata


def planned(
    window: int,
    sliding: int,
    prefill: list[int],
    cache: int,
    chosen: Any = None,
    *,
    whole: bool = False,
) -> Any:
    """The caches of a checkpoint of six layers, of which some see a window."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * (6 - sliding)
    config = {"sliding_window": window, "layer_types": kinds}
    return plan_caches(config, prefill, cache, chosen, whole=whole)


@pytest.mark.parametrize(
    ("window", "sliding", "prefill", "cache", "asked", "ring"),
    [
        (512, 5, [128], 4096, None, 512),
        (512, 5, [128, 1024], 4096, None, 1024),
        (500, 5, [128], 4096, None, 512),
        (64, 5, [65], 4096, None, 128),
        (512, 5, [128], 4096, 640, 640),
        (512, 5, [128], 512, None, None),  # no longer than the ring
        (512, 0, [128], 4096, None, None),
        (512, 6, [128], 4096, None, None),  # no whole cache tells the length
    ],
)
def test_a_ring_holds_the_window_and_the_longest_prefill_and_is_shorter_than_the_cache(
    window: int, sliding: int, prefill: list[int], cache: int, asked: int | None, ring: int | None
) -> None:
    assert planned(window, sliding, prefill, cache, asked)["ring"] == ring
    assert asked or planned(window, sliding, prefill, cache, whole=True)["ring"] is None


@pytest.mark.parametrize(
    ("sliding", "asked", "message"),
    [
        *((5, asked, "multiple of 64, at least 1024 .* less than") for asked in (256, 1100, 4096, "1024", True)),
        (0, 1024, "no sliding layers"),
    ],
)  # fmt: skip
def test_a_ring_that_cannot_work_is_refused(sliding: int, asked: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned(512, sliding, [128, 1024], 4096, asked)


def test_a_window_of_all_layers_that_litert_torch_cannot_export_is_refused_with_a_way_out() -> None:
    """As Mistral 7B v0.1 and Phi-3 have it; the export fails in transformers, long afterwards."""
    config = {"sliding_window": 2047, "layer_types": None}
    with pytest.raises(UsageError, match=r"no layer_types .*: set sliding_window to null"):
        plan_caches(config, [128], 1280, None, whole=False)
    with pytest.raises(UsageError, match="give cache=2047 or less, and set sliding_window"):
        plan_caches(config, [128], 4096, None, whole=False)
    without = {"sliding_window": None}
    assert plan_caches(without, [128], 1280, None, whole=False)["window"] is None


def test_the_window_is_that_of_sliding_layers_and_a_long_prefill_is_told_of() -> None:
    found = planned(512, 5, [512], 4096)
    assert (found["window"], len(found["notes"])) == (512, 1)
    assert "5 of 6 layers see 512 positions back and keep a ring buffer of 512" in found["notes"][0]
    assert (
        "does not apply the window within one prefill" in planned(512, 5, [1024], 4096)["notes"][1]
    )
    assert planned(512, 0, [1024], 4096) == {"window": None, "ring": None, "notes": []}


_INPUTS = "%m: float32[1,1,1,9], %k0: float32[1,1,4,8], %k1: float32[1,1,4,16]"
_NAMED = "mask_local=%m, kv_cache_k_0=%k0, kv_cache_k_1=%k1, e0=%e0, e1=%e1"
RINGS = f"""
signature decode = #0 ({_NAMED}) -> (kv_slice_k_0=%s0, kv_slice_k_1=%s1)
subgraph decode ({_INPUTS}, %e0: float32[1,1,8,1], %e1: float32[1,1,16,1]) {{
  %s0: float32[1,1,4,1] = BATCH_MATMUL(%k0, %e0)
  %s1: float32[1,1,4,1] = BATCH_MATMUL(%k1, %e1)
  return %s0, %s1
}}
"""


def metadata(window: int = 0) -> bytes:
    """Executor metadata of two key caches: a ring, and a whole one."""
    told = executor_metadata_pb2.ExecutorMetadata()
    for kind in (3, 1):
        told.llm_executor_metadata.state_buffers.add(type=kind)
    told.llm_executor_metadata.attention_mask_settings.sliding_window_size = window
    content: bytes = told.SerializeToString()
    return content


def ringed(folder: Path, told: bytes | None) -> Path:
    """A bundle with a ring of 8 and a cache of 16 positions."""
    path = folder / "rings.litertlm"
    model = model_part("prefill_decode", to_bytes(parse(RINGS)))
    path.write_bytes(bundle([*([] if told is None else [(9, {}, told)]), model, TOKENIZER]))
    return path


def test_window_and_caches_are_read_from_executor_metadata_also_when_replaced(
    tmp_path: Path,
) -> None:
    assert read_executor_metadata(read_bundle(ringed(tmp_path, None))) is None
    old, made = read_bundle(ringed(tmp_path, metadata())), tmp_path / "made.litertlm"
    old.write({0: metadata(300)}, made)
    new = read_bundle(made)
    assert read_executor_metadata(new) == (300, (True, False))
    assert [new.content(i).size for i in (1, 2)] == [old.content(i).size for i in (1, 2)]


A_GROUP_FOR_A_KIND = b"\x0a\x06\x12\x04\x33\x08\x01\x34"


@pytest.mark.parametrize("told", [b"\x0a", b"\x0a\x7f", b"\x80" * 11, b"\x0b", A_GROUP_FOR_A_KIND])
def test_damaged_metadata_is_refused(tmp_path: Path, told: bytes) -> None:
    with pytest.raises(ModelFormatError, match="executor metadata is damaged"):
        read_executor_metadata(read_bundle(ringed(tmp_path, told)))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            metadata(300),
            "caches: 1 ring buffer with 8, 1 with 16 positions; sliding layers see 300 pos",
        ),
        (metadata(), "LiteRT-LM assumes 8 positions. "),
        (
            None,
            "LiteRT-LM assumes 512 positions, and treats the longer axis of a cache as its positions",
        ),
    ],
)
def test_inspect_says_which_caches_are_rings(
    capsys: Captured, tmp_path: Path, told: bytes | None, said: str
) -> None:
    path = ringed(tmp_path, told)
    assert said in run(capsys, "inspect", path).out
    caches = inspect(path).to_dict()["caches"]
    assert [(cache["name"], cache["axis"], cache["ring"]) for cache in caches["caches"]] == [
        ("kv_cache_k_0", 3, True),
        ("kv_cache_k_1", 3, False),
    ]
