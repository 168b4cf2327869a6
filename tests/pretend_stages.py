"""The stages of a build as small plain functions: bundles of three sections instead of language models."""

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bundles import GENERIC, bundle, model_part
from text_parser import parse

from edge_opt.base.words import Progress
from edge_opt.build import BuildResult, Job, StageAnswer, build
from edge_opt.build.evaluation import Evaluation, ModelScore
from edge_opt.build.stage import STAGES
from edge_opt.build.stages import Processes
from edge_opt.ir import to_bytes
from edge_opt.npu.scoring import Closeness

FLOAT = """
signature prefill_4 = #0 (embeddings=%e, kv_cache_k_0=%k) -> (logits=%y)
subgraph prefill_4 (%e: float32[1,1,4,8], %k: float32[1,1,8,16]) {
  %y: float32[1,1,4,16] = BATCH_MATMUL(%e, %k)
  return %y
}
"""
QUANTIZED = """
signature prefill_4 = #0 (embeddings=%e, kv_cache_k_0=%k) -> (logits=%y)
subgraph prefill_4 (%e: int16[1,1,4,8] q(0.1, 0), %k: int16[1,1,8,16] q(0.1, 0)) {
  %y: int16[1,1,4,16] q(0.1, 0) = BATCH_MATMUL(%e, %k)
  return %y
}
"""
COMPILED = QUANTIZED.replace("BATCH_MATMUL", "CUSTOM 'DISPATCH_OP' ")
TOKENIZER = (GENERIC, {"name": "tokenizer"}, b"words")
WEIGHTS = (2).to_bytes(8, "little") + b"{}"
METADATA = (9, {}, bytes([0x0A, 2, 0x08, 16]))  # executor metadata: a history of 16 tokens


def bundle_of(text: str, *others: Any) -> bytes:
    """A bundle with this prefill/decode model, and other sections around it."""
    model = to_bytes(parse(text))
    return bundle([*(others or (METADATA,)), model_part("prefill_decode", model), TOKENIZER])


def write(path: Path, text: str, *others: Any) -> Path:
    """Such a bundle as a file."""
    path.write_bytes(bundle_of(text, *others))
    return path


def checkpoint(folder: Path) -> Path:
    """What is looked at of a Hugging Face folder."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gemma3_text"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


@dataclass
class Stages(Processes):
    """A toolchain; `ran` are the stages that were carried out, `instead` what some of them do otherwise."""

    instead: Mapping[str, Callable[[Job], None]] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=lambda: {"edge-opt": "1"})
    ran: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    checked: bool = False
    npu_kl: float = 0.2

    def versions(self) -> dict[str, str]:
        """Of what there is."""
        return self.installed

    def check_runtimes(self, *, bundles: bool = True) -> dict[str, str]:
        """Of what runs models."""
        self.checked = True
        return {"litert-lm-api": "1"}

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> StageAnswer:
        """One function."""
        assert scratch.is_dir()
        assert not any(Path(job.output).iterdir())
        log.write_text(f"noise of {job.stage}\n")
        self.ran.append(job.stage)
        self.jobs[job.stage] = job
        progress(job.stage, 1, 2)
        told = getattr(self, job.stage)(job)
        if job.stage in self.instead:
            self.instead[job.stage](job)
        return StageAnswer(told, 5 << 20)

    def configure(self, job: Job) -> dict[str, Any]:
        """Settings as the pipeline's: what each stage takes."""
        told = {"cache_length": 1280, **job.options["settings"]}
        steps = told.pop("max_calibration_decode_steps", 32)
        taken = {
            "export": told,
            "calibrate": {"max_calibration_decode_steps": steps},
            "quantize": {},
            "compile": {"soc_model": job.options["chip"]},
        }
        return {
            "config": {"soc_model": job.options["chip"], **told},
            "settings": taken,
            "caches": job.options["caches"],
        }

    def export(self, job: Job) -> dict[str, Any]:
        """The float bundle."""
        write(job.model, FLOAT)
        return {}

    def calibrate(self, job: Job) -> dict[str, Any]:
        """Something that depends on the prompts."""
        read = hashlib.sha256(Path(job.inputs["prompts"]).read_bytes()).hexdigest()
        (Path(job.output) / "ranges.json").write_text(read)
        return {}

    def quantize(self, job: Job) -> dict[str, Any]:
        """The quantized bundle."""
        write(job.model, QUANTIZED)
        return {"notes": ["put back: metadata"]}

    def narrow(self, job: Job) -> dict[str, Any]:
        """Nothing: what it does is tested with models."""
        shutil.copyfile(job.inputs["model"], job.model)
        return {}

    def optimize(self, job: Job) -> dict[str, Any]:
        """Nothing but what it says."""
        shutil.copyfile(job.inputs["model"], job.model)
        kept = {
            "signature": "prefill_4",
            "kept": "converted",
            "why": "2.0 ms as exported, 1.0 ms as converted",
        }
        compiled = {"prefill_decode": {"compile": True}}
        return {"signatures": [kept], "notes": [], "compile_configs": compiled, "steps": []}

    def evaluate(self, job: Job) -> dict[str, Any]:
        """The checkpoint finds every token as likely as one of 2, the bundle as one of 4."""
        closeness = [Closeness([], [], [math.log(chance)] * 2) for chance in (0.5, 0.25)]
        scores = [
            ModelScore.of(name, own, closeness[0]) for name, own in zip(job.inputs, closeness, strict=True)
        ]
        return asdict(Evaluation(scores, len(job.options["parts"])))

    def emulate(self, job: Job) -> dict[str, Any]:
        """The same on the CPU, and a little worse in the emulator."""
        closeness = [
            Closeness([kl] * 8, [True] * 8, [math.log(0.5) - kl] * 8) for kl in (0.0, 0.1, self.npu_kl)
        ]
        names = [*job.inputs, "converted"]
        scores = [
            ModelScore.of(name, own, closeness[0], on_npu=at == 2)
            for at, (name, own) in enumerate(zip(names, closeness, strict=True))
        ]
        return asdict(Evaluation(scores, 1))

    def compile(self, job: Job) -> dict[str, Any]:
        """One call of the NPU."""
        write(job.model, COMPILED)
        return {}


class InProcess(Processes):
    """Carries out a stage as it is, without a process of its own; `jobs` are those so far."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def check_runtimes(self, *, bundles: bool = True) -> dict[str, str]:
        """All is there."""
        return {}

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> StageAnswer:
        """The stage's own function."""
        self.jobs.append(job)
        return StageAnswer(STAGES[job.stage](job, progress))


class Place:
    """A folder with all that a build needs: checkpoint, prompts, and a vendor's libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = checkpoint(folder / "gemma")
        self.output = folder / "gemma.litertlm"
        self.work = folder / "gemma.work"
        self.prompts = folder / "prompts.jsonl"
        self.prompts.write_text('"hello"\n{"prompt": "how are you"}\n')
        self.sdk = folder / "sdk"
        self.sdk.mkdir()
        for name in ("libQnnHtp.so", "libQnnSystem.so"):
            (self.sdk / name).write_bytes(name.encode())

    def build(
        self, source: Path | None = None, stages: Stages | None = None, **options: Any
    ) -> tuple[Stages, BuildResult]:
        stages = stages or Stages()
        if options.get("prompts", "") == "":
            options["prompts"] = self.prompts
        told = {"soc": "SM8750", "sdk": self.sdk, "overwrite": True, "output": self.output, **options}
        return stages, build(source or self.checkpoint, toolchain=stages, **told)
