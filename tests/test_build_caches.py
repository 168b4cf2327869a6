"""Caches of a build: how long the rings of sliding layers are, what is refused, and what a bundle says of them."""

from pathlib import Path

import pytest
from bundles import bundle, model_part
from cli_runs import run
from pretend_stages import TOKENIZER
from text_parser import parse

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.build.source import SlidingLayers
from edge_opt.inspection import inspect
from edge_opt.ir import to_bytes
from edge_opt.schema.litertlm import read_bundle, read_executor_metadata

GEMMA = SlidingLayers(window=512, sliding=5, count=6)


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
    layers = SlidingLayers(window, sliding, 6)
    assert layers.ring(prefill, cache, asked, whole=False) == ring
    assert asked or layers.ring(prefill, cache, asked, whole=True) is None


@pytest.mark.parametrize(
    ("layers", "asked", "message"),
    [
        *((GEMMA, asked, "multiple of 64, at least 1024 .* less than the cache, 4096") for asked in (256, 1100, 4096)),
        (SlidingLayers(count=6), 1024, "no sliding layers"),
    ],
)  # fmt: skip
def test_a_ring_that_cannot_work_is_refused(layers: SlidingLayers, asked: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layers.ring([128, 1024], 4096, asked, whole=False)


def test_layers_are_counted_by_kind_and_a_long_prefill_is_told_of() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert SlidingLayers.of({"sliding_window": 512, "layer_types": kinds}) == SlidingLayers(512, 2, 3)
    assert SlidingLayers.of({"sliding_window": 512, "layer_types": kinds[1:2]}) == SlidingLayers(0, 0, 1)
    assert SlidingLayers.of({"sliding_window": 4096}) == SlidingLayers()
    assert len(GEMMA.notes(512, [512])) == 1
    assert "applies no window within one chunk" in GEMMA.notes(1024, [1024])[1]
    assert SlidingLayers(count=2).notes(None, [1024]) == []


# --- what a bundle says ---

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


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protocol buffer; numbers and lengths below 16384."""
    size = value if isinstance(value, int) else len(value)
    count = bytes([size]) if size < 128 else bytes([size % 128 + 128, size // 128])
    return (
        bytes([8 * number + 2 * isinstance(value, bytes)])
        + count
        + (b"" if isinstance(value, int) else value)
    )


def metadata(*, window: int | None = None, layers: int = 2) -> bytes:
    """Executor metadata of as many key caches, all but the last of them rings."""
    buffers = [
        field(2, field(3, f"kv_cache_k_{layer}".encode()) + field(6, kind) + field(7, 3))
        for layer, kind in enumerate([3] * (layers - 1) + [1])
    ]
    masks = b"" if window is None else field(3, field(1, 1) + field(3, window))
    return field(1, field(1, 16) + b"".join(buffers) + masks)


def ringed(folder: Path, told: bytes | None) -> Path:
    """A bundle with a ring of 8 and a cache of 16 positions."""
    path = folder / "rings.litertlm"
    model = model_part("prefill_decode", to_bytes(parse(RINGS)))
    path.write_bytes(bundle([*([] if told is None else [(9, {}, told)]), model, TOKENIZER]))
    return path


def test_window_and_caches_are_read_from_the_executor_metadata_also_after_it_was_replaced(
    tmp_path: Path,
) -> None:
    assert read_executor_metadata(read_bundle(ringed(tmp_path, None))) is None
    old, made = read_bundle(ringed(tmp_path, metadata())), tmp_path / "made.litertlm"
    old.write({0: metadata(window=300)}, made)
    new = read_bundle(made)
    told = read_executor_metadata(new)
    assert told is not None
    assert told.window == 300
    assert told.rings == (True, False)
    assert [new.content(i).size for i in (1, 2)] == [old.content(i).size for i in (1, 2)]
    told = read_executor_metadata(read_bundle(ringed(tmp_path, metadata(window=300, layers=30))))
    assert told is not None
    assert (told.window, len(told.rings)) == (300, 30)


@pytest.mark.parametrize("told", [b"\x0a", b"\x0a\x7f", b"\x80" * 11, b"\x0b"])
def test_damaged_metadata_is_refused(tmp_path: Path, told: bytes) -> None:
    with pytest.raises(ModelFormatError, match="executor metadata is damaged"):
        read_executor_metadata(read_bundle(ringed(tmp_path, told)))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            metadata(window=300),
            "caches: 1 ring buffer of 8, 1 of 16 positions; sliding layers see 300 positions",
        ),
        (metadata(), "LiteRT-LM assumes 8 positions. "),
        (None, "LiteRT-LM assumes 512 positions, and treats the longer axis of a cache as its positions"),
    ],
)
def test_inspect_says_which_caches_are_rings_and_what_litert_lm_assumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, told: bytes | None, said: str
) -> None:
    path = ringed(tmp_path, told)
    assert said in run(capsys, "inspect", path).out
    caches = inspect(path).to_dict()["caches"]
    assert [(cache["name"], cache["axis"], cache["ring"]) for cache in caches["caches"]] == [
        ("kv_cache_k_0", 3, True),
        ("kv_cache_k_1", 3, False),
    ]
