"""`compare --generate`: two models generate text through prefill, decode and caches; the tokens must be the same."""

from pathlib import Path
from typing import Any

import generation_models as models
import numpy as np
import pytest
from bundles import bundle, model_part
from cli_runs import DEMO, run, state
from generation_models import ROWS, export

from edge_opt import EdgeOptError, compare, load
from edge_opt.base.errors import UsageError
from edge_opt.comparison.findings import GenerationComparison
from edge_opt.runtime.errors import RuntimeRefused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A split export with its helpers, an unsplit one, and of each one that computes something else."""
    helpers = {"embedder": models.embedder(), "auxiliary": models.auxiliary()}
    split = {"model": models.split(), "other": models.split(-1.0)}
    unsplit = {"unsplit": models.unsplit(), "unsplit_other": models.unsplit(-1.0)}
    return export(tmp_path_factory.mktemp("export"), **helpers, **split, **unsplit)


def generated(a: Any, b: Any, count: int = 8, **options: Any) -> GenerationComparison:
    found = compare(a, b, generate=count, locate=False, **options).generation
    assert found is not None
    return found


def by_hand(prompt: list[int], count: int) -> list[int]:
    """The same model in a few lines of numpy, without any cache."""
    words, head, tokens = models.table(), models.table(1), list(prompt)
    for _ in range(count):
        seen = words[tokens]
        scores = seen[-1] @ seen.T
        weights = np.exp(scores - scores.max())
        mixed = weights / weights.sum() @ seen[:, ::-1]
        tokens.append(int((head @ mixed).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["model", "unsplit"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loop_generates_what_the_model_means(name: str, seed: int, folder: Path) -> None:
    path = folder / f"{name}.tflite"
    found = generated(path, path, count=11, seed=seed)
    (prompt,) = found.prompt
    assert len(prompt) == ROWS + 1
    assert [step[0] for step in found.a] == by_hand(list(prompt), 11)
    assert found.equal
    assert found.logits.bitwise


def test_a_prompt_leaves_room_for_what_is_generated(folder: Path) -> None:
    found = generated(folder / "model.tflite", folder / "model.tflite", count=14)
    assert len(found.prompt[0]) == 3
    assert [step[0] for step in found.a] == by_hand(list(found.prompt[0]), 14)


@pytest.mark.parametrize("pair", [("model", "other"), ("unsplit", "unsplit_other")])
def test_other_tokens_are_a_difference(pair: tuple[str, str], folder: Path) -> None:
    a, b = (folder / f"{name}.tflite" for name in pair)
    report = compare(a, b, generate=8, atol=1e9)
    assert all(each.equal for each in report.signatures), "only the tokens differ within this tolerance"
    found = report.generation
    assert found is not None
    assert found.first_difference is not None
    place = found.first_difference
    assert found.a[:place] == found.b[:place]
    assert found.a[place] != found.b[place]
    assert not report.equal
    assert f"from step {place} of 8 on" in report.differences()[-1]
    assert report.summary() == report.differences()[0]


def test_split_and_unsplit_exports_generate_the_same(folder: Path) -> None:
    split = generated(folder / "model.tflite", folder / "model.tflite")
    unsplit = generated(folder / "unsplit.tflite", folder / "unsplit.tflite")
    assert split.prompt == unsplit.prompt
    assert split.a == unsplit.a


def alone(folder: Path, name: str, text: str) -> Path:
    return export(folder, **{name: text}) / f"{name}.tflite"


def test_what_is_missing_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    path = alone(tmp_path, "model", models.split())
    helpers = {"embedder": folder / "embedder.tflite", "auxiliary": folder / "auxiliary.tflite"}
    with pytest.raises(UsageError, match="input 'embeddings' comes from the embedder model"):
        generated(path, path)
    assert generated(path, path, **helpers).equal
    # Helpers of one model serve the other.
    assert generated(folder / "model.tflite", path).equal
    assert generated(path, folder / "model.tflite").equal


def test_models_in_memory_generate_too(folder: Path) -> None:
    a, b = (folder / "unsplit.tflite").read_bytes(), load(folder / "unsplit.tflite")
    assert generated(a, b).equal
    helpers = {name: (folder / f"{name}.tflite").read_bytes() for name in ("embedder", "auxiliary")}
    assert generated((folder / "model.tflite").read_bytes(), folder / "model.tflite", **helpers).equal


def test_a_bundle_brings_its_own_helpers(folder: Path, tmp_path: Path) -> None:
    sections = {"prefill_decode": "model", "embedder": "embedder", "aux": "auxiliary"}

    def made(name: str, **other: str) -> Path:
        files = {kind: folder / f"{file}.tflite" for kind, file in {**sections, **other}.items() if file}
        path = tmp_path / f"{name}.litertlm"
        path.write_bytes(bundle([model_part(kind, file.read_bytes()) for kind, file in files.items()]))
        return path

    whole = made("whole")
    report = compare(whole, folder / "model.tflite", generate=8)
    assert report.bitwise
    assert report.a == str(whole)
    assert report.generation is not None
    assert report.generation.equal
    assert not generated(whole, made("other", prefill_decode="other")).equal
    bare = made("bare", embedder="", aux="")
    with pytest.raises(UsageError, match="comes from the embedder model"):
        generated(bare, bare)
    with pytest.raises(UsageError, match="has no prefill_decode model, its models are: "):
        generated(made("empty", prefill_decode=""), whole)


def test_a_model_that_the_runtime_refuses_is_named(folder: Path, tmp_path: Path) -> None:
    text = models.embedder().replace("GATHER(", "EMBEDDING_LOOKUP(")
    wrong = alone(tmp_path, "wrong", text)
    path = folder / "model.tflite"
    with pytest.raises(RuntimeRefused, match="embedder model, signature"):
        generated(path, path, embedder=wrong)


def test_the_command_generates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = state(folder)
    ran = run(capsys, "compare", folder / "model.tflite", folder / "model.tflite", "--generate", "4")
    assert (ran.code, ran.err) == (0, "")
    assert "Generated: 4 generated tokens are the same, after a prompt of 5 (xnnpack)" in ran.out
    pair = folder / "model.tflite", folder / "other.tflite"
    ran = run(capsys, "compare", *pair, "--generate", "8", "--json")
    assert ran.code == 1
    said = ran.json["generation"]
    assert (said["equal"], said["count"], len(said["a"]), len(said["b"])) == (False, 8, 8, 8)
    assert said["a"][said["first_difference"]] != said["b"][said["first_difference"]]
    sentence = run(capsys, "compare", DEMO, DEMO, "--generate", "4").failed_in_one_sentence(2)
    assert "embedder" in sentence
    assert state(folder) == before


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "expected 1 to 100000"),
        (100_001, "expected 1 to"),
        (100_000, "do not fit into a cache"),
        ("4", "'4' tokens to generate"),
        (1.5, "1.5 tokens to generate"),
    ],
)
def test_too_little_or_too_much_to_generate_is_refused(count: int, said: str, folder: Path) -> None:
    with pytest.raises(EdgeOptError, match=said):
        generated(folder / "unsplit.tflite", folder / "unsplit.tflite", count=count)
