"""Evaluates bundles against the model that they were made from, each in a process of its own."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.build.prompts import read_prompts, text_of
from edge_opt.build.scoring import Evaluation, ModelScore, Part, Said, cut, other_tokens
from edge_opt.build.sections import SENTENCEPIECE, TOKENIZER
from edge_opt.build.source import Kind, look_at, read_json
from edge_opt.build.work import Job, Processes, StageFailedError
from edge_opt.ir.opening import Opened
from edge_opt.schema.litertlm import read_bundle

_FEWEST, _SHARE = 10, 5
"""Prompts to hold one in so many out of."""
_COMPLAINT = re.compile(r"^[EF]\d{4} .*?\] (.+)$", re.MULTILINE)


def evaluate(
    reference: AnyPath,
    bundles: AnyPath | Sequence[AnyPath],
    prompts: AnyPath,
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
    models = {os.fspath(path): Path(path) for path in (reference, *given)}
    tools = toolchain or Processes()
    text = HeldOut(held_out(Path(prompts)))
    check_models(Path(reference), [Path(path) for path in given])
    tools.check_runtimes(checkpoint=Path(reference).is_dir())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return compare(tools, models, text, folder / "log", folder, progress or (lambda *_: None))[0]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The text to evaluate on.

    `parts` are empty where nothing is evaluated; `note` says where the text came from, or why there is none. `rest` are
    the prompts that are left to calibrate with, where these were chosen among them; then long ones are skipped.
    """

    parts: list[Part] = field(default_factory=list)
    rest: list[Any] | None = None
    note: str = ""


def choose(path: AnyPath | None, prompts: AnyPath | None) -> HeldOut:
    """The text of a file, else every fifth prompt; the others are left to calibrate with.

    Raises:
        UsageError: a file cannot be read, or the text was calibrated on.
    """
    given = [] if prompts is None else read_prompts(Path(prompts))
    if path is not None:
        return HeldOut(held_out(Path(path), given), note=f"Evaluated on {path}")
    if len(given) < _FEWEST:
        return HeldOut(
            note=f"Nothing was evaluated, for there are fewer than {_FEWEST} prompts to hold some out: give "
            f"--held-out FILE.jsonl"
        )
    rest = [prompt for at, prompt in enumerate(given) if at % _SHARE]
    texts = {text_of(prompt).strip() for prompt in rest}
    chosen = [text_of(prompt) for prompt in given[::_SHARE]]
    parts = [cut(text) for text in chosen if text.strip() not in texts]
    scored = [part for part in parts if part]
    note = (
        f"Held out of the calibration, to evaluate with: {len(chosen)} of {len(given)} prompts, every fifth"
    )
    return HeldOut(scored, rest if scored else None, note)


def held_out(path: Path, calibrated: Sequence[Any] = ()) -> list[Part]:
    """The prompts of a file, each cut in two; UsageError where one is too short, or was calibrated on."""
    seen = {text_of(prompt).strip() for prompt in calibrated}
    parts = []
    for number, prompt in enumerate(read_prompts(path), 1):
        where, text = f"held-out prompts {path}, prompt {number}", text_of(prompt)
        if text.strip() in seen:
            raise UsageError(
                f"{where} is among those to calibrate with, so it shows nothing: take it out of one of the files"
            )
        part = cut(text)
        if part is None:
            raise UsageError(f"{where} is too short to be scored: give at least two words")
        parts.append(part)
    return parts


def check_models(reference: Path, bundles: Sequence[Path]) -> None:
    """Whether all are what they have to be, as far as their files tell.

    Raises:
        UsageError: one is not, or the reference has another vocabulary.
        ModelFormatError: one cannot be read.
    """
    if {*bundles} <= {reference}:
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
    if not any(section.data_type in (SENTENCEPIECE, TOKENIZER) for section in bundle.sections):
        raise UsageError(f"{path} has no tokenizer, so it takes no text: give the bundle with it")
    logits = (
        t for s in Opened(path).main().model.signatures for name, t in s.outputs.items() if "logits" in name
    )
    return next((int(tensor.shape[-1]) for tensor in logits), None)


def compare(
    tools: Processes, models: Mapping[str, Path], text: HeldOut, log: Path, scratch: Path, progress: Progress
) -> tuple[Evaluation, int]:
    """The scores of models by the names that they go by, the reference first, and the most memory of one in bytes.

    The bundles run first: the reference scores the very tokens that LiteRT-LM made, and judges what they generated.

    Args:
        tools: run the models.
        models: the reference, then the bundles.
        text: with parts.
        log: for what the models print; that of the last one stays.
        scratch: an empty folder.
        progress: called with (name, done, total).

    Raises:
        UsageError: the models make other tokens of a prompt.
        StageFailedError: a model did not run.
    """
    reference, *bundles = models
    folder = str(models[reference].resolve()) if models[reference].is_dir() else None
    said: dict[str, list[Said]] = {}
    agreed: dict[str, int] = {}
    peak = 0
    for name in (*bundles, reference):
        options: dict[str, Any] = {"parts": text.parts, "skip_long": text.rest is not None}
        first = next(iter(said.values()), None)
        if name == reference:
            options["said"] = None if folder is None or first is None else [asdict(one) for one in first]
            options["judged"] = {bundle: [one.generated for one in every] for bundle, every in said.items()}
        elif first is None:
            options["tokenizer"] = folder
        job = Job("score", "", {"model": str(models[name].resolve())}, options=options)
        place = scratch / f"score-{len(said) + 1}"
        place.mkdir()
        try:
            done = tools.carry_out(job, log, place, lambda _, *step, name=name: progress(name, *step))
        except StageFailedError as error:
            complaints = _COMPLAINT.findall(log.read_text(encoding="utf-8", errors="replace"))
            complaint = f" ({complaints[-1]})" if complaints else ""
            raise StageFailedError(f"{Path(name).name} did not run: {error}{complaint}") from error
        said[name] = [Said(**one) for one in done.values["said"]]
        for at, (one, other) in enumerate(zip(said[name], first or said[name], strict=True)):
            for ours, theirs in ((one.before, other.before), (one.scored, other.scored)):
                if ours != theirs:
                    raise other_tokens(at, len(ours), len(theirs))
        agreed, peak = done.values["agreed"], max(peak, done.peak_bytes or 0)
    skipped = sum(not one.scored for one in said[reference])
    scores = [ModelScore.of(name, said[name], agreed.get(name)) for name in models]
    return Evaluation(scores, len(text.parts) - skipped, skipped), peak
