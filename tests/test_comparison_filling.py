"""`compare` reads caches that a prefill filled, not noise; what the models of `generation_models` compute by hand."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import generation_models as models
import numpy as np
import pytest
from cli_runs import run
from generation_models import ROWS, export

from edge_opt import compare
from edge_opt.base.record import from_dict
from edge_opt.comparison import generate
from edge_opt.comparison.generate import FilledCaches
from edge_opt.runtime.errors import RuntimeCrashed
from edge_opt.runtime.inputs import InputPlan, Stored, array_of
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import TensorInfo


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = {"split": models.split(), "unsplit": models.unsplit(), "decode_only": models.unsplit(key="fill")}
    return export(tmp_path_factory.mktemp("export"), **made)


def filled(path: Path, worker: Worker, runs: Sequence[int], folder: Path) -> FilledCaches:
    described = {signature.name: signature for signature in worker.describe(path)}
    caches = FilledCaches(worker, path, described, 5, folder)
    by_filler, without = caches.served(described)
    assert (by_filler, without) == ({"prefill_4": ["prefill_4", "decode"]}, [])
    caches.fill("prefill_4", ["prefill_4", "decode"], runs)
    return caches


def taken(caches: FilledCaches, run: int, name: str) -> np.ndarray:
    """What the prefill was given of one input, all chunks of a run together."""
    count = caches._needed(["prefill_4", "decode"], run)
    chunks = caches._chunks(caches.described["prefill_4"], count, run)
    assert [chunk.start for chunk in chunks] == list(range(0, count, ROWS))
    return np.concatenate([array_of(m)[0] for chunk in chunks for m in chunk.plans if m.info.name == name])


def test_an_unsplit_cache_holds_the_keys_of_every_token_before(
    folder: Path, worker: Worker, tmp_path: Path
) -> None:
    caches = filled(folder / "unsplit.tflite", worker, [0, 1, 3], tmp_path)
    for number in (0, 1):
        keys = models.table()[taken(caches, number, "tokens")]
        found = caches.stored["decode", number, "kv_cache_k_0"].array()[0, 0]
        values = caches.stored["decode", number, "kv_cache_v_0"].array()[0, 0]
        assert len(keys) >= ROWS
        assert np.array_equal(found[: len(keys)], keys)
        assert np.array_equal(values[: len(keys)], keys[:, ::-1])
        assert not found[len(keys) :].any()
    fourth = caches.stored["prefill_4", 3, "kv_cache_k_0"].array()
    assert not fourth.any(), "every fourth run begins with nothing"


def test_a_split_cache_gets_its_new_part_where_it_belongs(
    folder: Path, worker: Worker, tmp_path: Path
) -> None:
    caches = filled(folder / "split.tflite", worker, [0], tmp_path)
    keys = taken(caches, 0, "embeddings")
    found = caches.stored["prefill_4", 0, "kv_cache_k_0"].array()[0, 0]
    assert np.array_equal(found[: len(keys)], keys)
    assert not found[len(keys) :].any()


def test_a_long_cache_is_filled_by_four_calls_and_read_no_further(
    folder: Path, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_MOST_CALLS", 1)
    caches = filled(folder / "unsplit.tflite", worker, [0, 1], tmp_path)
    planned = [caches._needed(["decode"], number) for number in (0, 1)]
    assert max(planned) > ROWS, "otherwise this shows nothing"
    for number, start in enumerate(planned):
        made = caches.plan("decode", number)
        assert {one.start for one in made} == {min(start, ROWS)}
        keys = caches.stored["decode", number, "kv_cache_k_0"].array()[0, 0]
        assert keys[:start].any()
        assert not keys[ROWS:].any()
    assert caches.notes[0].startswith("caches of prefill_4, decode: filled by prefill_4 up to position 4")


@pytest.mark.parametrize("name", ["split", "unsplit"])
def test_both_models_read_what_the_first_ones_prefill_left(
    name: str, folder: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Sequence[InputPlan]]] = []
    run_plans = worker.run_plans
    monkeypatch.setattr(worker, "run_plans", lambda *given: asked.append(given[2]) or run_plans(*given))
    path = folder / f"{name}.tflite"
    report = compare(path, path, runs=2, hostile=True, worker=worker)
    assert report.bitwise
    (said,) = report.caches
    assert said.startswith("caches of prefill_4, decode: filled by prefill_4 up to position ")
    stored = [
        [{made.stored for made in listed if made.role == "cache"} for listed in plans] for plans in asked
    ]
    assert all(None not in one for plans in stored for one in plans[:2]), "realistic sets"
    assert all(one == {None} for plans in stored for one in plans[2:]), "hostile ones keep what is hostile"
    assert stored[0] == stored[1] == stored[2] == stored[3]
    told = [int(count) for count in said.rsplit("position ", 1)[1].split(", ")]
    assert told == [max(made.start for plans in asked for made in plans[number]) for number in (0, 1)]


def test_caches_that_no_prefill_fills_are_random_and_that_is_said(
    folder: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "decode_only.tflite"
    report = compare(path, path, worker=worker)
    assert report.caches == ("caches of fill, decode: random, because no prefill signature of a fills them",)
    assert report.to_dict()["caches"] == list(report.caches)
    assert report.caches[0] in run(capsys, "compare", path, path).out

    def crash(*_: Any, **__: Any) -> None:
        raise RuntimeCrashed("signal 11")

    monkeypatch.setattr(worker, "fill", crash)
    found = compare(folder / "split.tflite", folder / "split.tflite", worker=worker)
    assert found.bitwise
    assert found.caches[0].endswith("random, because the prefill that would fill them failed: signal 11")


def test_a_quantized_counterpart_reads_the_same_real_numbers(tmp_path: Path) -> None:
    path = tmp_path / "caches"
    path.write_bytes(b"before" + np.array([0.5, -1.0, 2.0], np.float32).tobytes())
    real = TensorInfo("kv_cache_k_0", "k", (3,), (3,), "float32")
    coded = TensorInfo("kv_cache_k_0", "k", (3,), (3,), "int8", (0.25,), (3,))
    stored = Stored(str(path), 6, real)
    made = InputPlan("cache", info=coded, stored=stored)
    assert array_of(made).tolist() == [5, -1, 11]
    assert from_dict(InputPlan, json.loads(json.dumps(asdict(made)))) == made
