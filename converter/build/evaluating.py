"""Evaluates bundles against the model that they were made from, each in a process of its own."""

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edge_opt.build.jobs import Carried, Job, StageFailedError
from edge_opt.build.processes import Processes
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.source import Kind, look_at, read_json
from edge_opt.comparison.models import model_of
from edge_opt.conversion.choices import Progress
from edge_opt.evaluation.findings import Evaluation, Generated, Part, Said, cut, other_tokens, score
from edge_opt.output.errors import UsageError
from edge_opt.schema.litertlm import read_bundle

ModelPath = str | os.PathLike[str]
CarryOut = Callable[[Job, str, Progress], Carried]
"""Runs a job whose log has this name."""

_TOKENIZERS = (4, 6)
"""Types of a bundle's sections: SentencePiece's, and Hugging Face's."""
_FEWEST, _SHARE = 10, 5
"""Prompts to hold one in so many out of."""
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)


def evaluate(
    reference: ModelPath,
    bundles: ModelPath | Sequence[ModelPath],
    prompts: ModelPath,
    *,
    progress: Progress | None = None,
    toolchain: Processes | None = None,
) -> Evaluation:
    """Whether bundles are still the model that they were made from: perplexity on held-out text, and agreement.

    Bundles run in LiteRT-LM's executor for NPUs on CPU kernels, as they are before the vendor's compiler. Of each
    prompt the second half, at most 512 characters, is scored: the prefill reads what stands before it, decode the rest.

    Args:
        reference: the checkpoint, a Hugging Face folder, or a float .litertlm.
        bundles: .litertlm bundles for NPUs, not compiled.
        prompts: JSON lines, as `edge_opt.build.build` has them, that no bundle was calibrated on.
        progress: called with (source, done, total).
        toolchain: what runs the models; processes where None.

    Raises:
        UsageError: something given cannot be evaluated, or a package is missing.
        ModelFormatError: a bundle cannot be read.
        StageFailedError: a model did not run.
    """
    given = [bundles] if isinstance(bundles, str | os.PathLike) else [*bundles]
    tools = toolchain or Processes()
    parts = held_out(Path(prompts))
    check_models(Path(reference), [Path(bundle) for bundle in given])
    tools.check_runtimes(checkpoint=Path(reference).is_dir())
    named = {os.fspath(bundle): Path(bundle) for bundle in given}
    with tempfile.TemporaryDirectory() as folder:
        run = partial(_carry_out, tools, Path(folder))
        return compare(
            run, (os.fspath(reference), Path(reference)), named, parts, progress or (lambda *_: None)
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The text that a build is evaluated on: `rest` are the prompts that are left to calibrate with.

    `parts` are empty where nothing is evaluated; `note` says where the text came from, or why there is none.
    """

    parts: list[Part] = field(default_factory=list)
    rest: list[Any] | None = None
    skip_long: bool = False
    note: str = ""


def choose(path: ModelPath | None, prompts: ModelPath | None) -> HeldOut:
    """The text of a file, else every fifth prompt; the others are left to calibrate with.

    Raises:
        UsageError: a file cannot be read, or the text was calibrated on.
    """
    known = [] if prompts is None else read_prompts(Path(prompts))
    if path is not None:
        parts = held_out(Path(path), known)
        return HeldOut(parts, note=f"Evaluated on {path}")
    if len(known) < _FEWEST:
        return HeldOut(
            note=f"Nothing was evaluated, for there are fewer than {_FEWEST} prompts to hold some out: give "
            f"--held-out FILE.jsonl"
        )
    rest = [prompt for at, prompt in enumerate(known) if at % _SHARE]
    texts = {text_of(prompt).strip() for prompt in rest}
    chosen = [text_of(prompt) for prompt in known[::_SHARE]]
    parts = [
        part for text in chosen for part in [cut(text)] if part is not None and text.strip() not in texts
    ]
    note = (
        f"Held out of the calibration, to evaluate with: {len(chosen)} of {len(known)} prompts, every fifth"
    )
    return HeldOut(parts, rest, skip_long=True, note=note) if parts else HeldOut(note=note)


def held_out(path: Path, calibrated: Sequence[Any] = ()) -> list[Part]:
    """The prompts of a file, each cut in two; UsageError where one is too short, or was calibrated on."""
    known = {text_of(prompt).strip() for prompt in calibrated}
    return [
        _part(path, number, text_of(prompt), known) for number, prompt in enumerate(read_prompts(path), 1)
    ]


def _part(path: Path, number: int, text: str, known: set[str]) -> Part:
    if text.strip() in known:
        raise UsageError(
            f"held-out prompts {path}, prompt {number} is among those to calibrate with, so it shows nothing: take it "
            f"out of one of the files"
        )
    part = cut(text)
    if part is None:
        raise UsageError(
            f"held-out prompts {path}, prompt {number} is too short to be scored: give at least two words"
        )
    return part


def check_models(reference: Path, bundles: Sequence[Path]) -> None:
    """Whether all are what they have to be, as far as their files tell.

    Raises:
        UsageError: one is not, or the reference has another vocabulary.
        ModelFormatError: one cannot be read.
    """
    if not bundles:
        raise UsageError("there is nothing to evaluate: give a bundle beside the reference")
    kinds = {path: look_at(path).kind for path in (reference, *bundles)}
    for path in bundles:
        if kinds[path] is Kind.CHECKPOINT:
            raise UsageError(f"{path} is a checkpoint: give it first, as the reference, and bundles after it")
    sizes = {path: _vocabulary(path) for path in kinds}
    for path, size in sizes.items():
        if None not in (size, sizes[reference]) and size != sizes[reference]:
            raise UsageError(
                f"{reference} has a vocabulary of {sizes[reference]} tokens and {path} one of {size}: give the model "
                f"that the bundle was made from"
            )


def _vocabulary(path: Path) -> int | None:
    """How many tokens a model knows; None where its files do not tell. A bundle must have a tokenizer."""
    if path.is_dir():
        config = read_json(path / "config.json")
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        return size if isinstance(size, int) else None
    bundle = read_bundle(path)
    if not any(section.data_type in _TOKENIZERS for section in bundle.sections):
        raise UsageError(f"{path} has no tokenizer, so it takes no text: give the bundle with it")
    model = model_of(bundle)
    assert model is not None, "looked at above"
    logits = (t for s in model.signatures for name, t in s.outputs.items() if "logits" in name)
    return next((int(tensor.shape[-1]) for tensor in logits), None)


def compare(
    carry_out: CarryOut,
    reference: tuple[str, Path],
    bundles: Mapping[str, Path],
    parts: Sequence[Part],
    progress: Progress,
    *,
    skip_long: bool = False,
) -> Evaluation:
    """The scores of the reference, then of the bundles, by the names that they go by.

    The bundles run first: the reference scores the very tokens that LiteRT-LM made, and judges what they generated.
    """
    name, path = reference
    folder = str(path.resolve()) if path.is_dir() else None
    told: dict[str, Any] = {"parts": parts, "skip_long": skip_long}
    said: dict[str, list[Said]] = {}

    def ask(model: Path, source: str, **options: Any) -> dict[str, Any]:
        job = Job("score", "", {"model": str(model.resolve())}, options={**told, **options})
        number = f"score-{len(said) + 1}"
        return carry_out(job, number, lambda _, done, total: progress(source, done, total)).told

    for source, bundle in bundles.items():
        found = ask(bundle, source, tokenizer=folder if not said else None)
        said[source] = [Said(**one) for one in found["said"]]
        check_same(said[source], next(iter(said.values())))
    tokens = [asdict(one) for one in next(iter(said.values()))]
    judged: dict[str, list[Generated]] = {
        source: [one.generated for one in every] for source, every in said.items()
    }
    found = ask(path, name, said=tokens if path.is_dir() else None, judged=judged)
    own = [Said(**one) for one in found["said"]]
    check_same(own, next(iter(said.values())))
    models = [score(name, own, None)]
    models += [score(source, every, found["agreed"][source]) for source, every in said.items()]
    skipped = sum(not one.scored for one in own)
    return Evaluation(models, len(parts) - skipped, skipped)


def check_same(said: Sequence[Said], first: Sequence[Said]) -> None:
    """UsageError where two models made other tokens of a prompt."""
    for at, (one, other) in enumerate(zip(said, first, strict=True)):
        for ours, theirs in ((one.before, other.before), (one.scored, other.scored)):
            if ours != theirs:
                raise other_tokens(at, len(ours), len(theirs))


def evaluated(
    tools: Processes, text: HeldOut, job: Job, log: Path, scratch: Path, progress: Progress
) -> Carried:
    """A whole evaluation as one stage of a build: its inputs are the reference, then the bundles, by name."""
    peaks: list[int] = []

    def carry_out(one: Job, name: str, report: Progress) -> Carried:
        folder = scratch / name
        folder.mkdir()
        done = tools.carry_out(one, log, folder, report)
        peaks.append(done.peak_bytes or 0)
        return done

    (name, reference), *bundles = ((name, Path(path)) for name, path in job.inputs.items())
    found = compare(
        carry_out,
        (name, reference),
        dict(bundles),
        text.parts,
        lambda _, done, total: progress(job.stage, done, total),
        skip_long=text.skip_long,
    )
    return Carried(found.to_dict(), max(peaks))


def _carry_out(tools: Processes, folder: Path, job: Job, name: str, progress: Progress) -> Carried:
    """One job in a folder of its own; a failure has the last complaint of its log, for that goes with the folder."""
    scratch, log = folder / name, folder / f"{name}.log"
    scratch.mkdir()
    try:
        return tools.carry_out(job, log, scratch, progress)
    except StageFailedError as error:
        said = _COMPLAINT.findall(log.read_text(encoding="utf-8", errors="replace"))
        model = Path(job.inputs["model"]).name
        raise StageFailedError(f"{model} did not run: {error}{f' ({said[-1]})' if said else ''}") from error
