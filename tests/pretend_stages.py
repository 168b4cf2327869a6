"""The stages of a build as small plain functions: bundles of three sections instead of language models."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bundles import GENERIC, bundle, model_part

from edge_opt.base.words import Progress
from edge_opt.building import BuildResult, build, evaluation, stages
from edge_opt.building.evaluation import Evaluation, ModelScore
from edge_opt.building.stage_process import STAGES
from edge_opt.building.stages import Job
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse

KEPT = "prefill_4 kept as converted: 2.0 ms as exported, 1.0 ms as converted"
GAIN = {
    "signature": "prefill_4",
    "before": {"time": {"us": 2000}},
    "after": {"time": {"us": 1000}},
    "kept": "converted",
}
NOTE = "times are for SA8797"
QUANTIZED = """
signature prefill_4 = #0 (embeddings=%e, kv_cache_k_0=%k) -> (logits=%y, kv_slice_k_0=%s)
subgraph prefill_4 (%e: int16[1,1,4,8] q(0.1, 0), %k: int16[1,1,8,16] q(0.1, 0)) {
  %y: int16[1,1,4,16] q(0.1, 0) = BATCH_MATMUL(%e, %k)
  %s: int16[1,1,8,4] q(0.1, 0) = TRANSPOSE(%e, int32{0, 1, 3, 2})
  return %y, %s
}
"""
COMPILED = f"""{QUANTIZED.partition("  %y")[0]}
  %y: int16[1,1,4,16] q(0.1, 0), %s: int16[1,1,8,4] q(0.1, 0) = CUSTOM 'DISPATCH_OP' (%e, %k)
  return %y, %s
}}
"""
FLOAT = QUANTIZED.replace("int16", "float32").replace(" q(0.1, 0)", "")
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


def adapter(folder: Path, **config: str) -> Path:
    """What is looked at of a LoRA folder."""
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "google/gemma", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return folder


@dataclass
class Stages:
    """A toolchain; `ran` are the stages that were carried out, `instead` what some of them do otherwise."""

    instead: Mapping[str, Callable[[Job], object]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=lambda: {"edge-opt": "1"})
    ran: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    checked: bool = False
    npu_kl: float = 0.2
    rotated: bool = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Builds run these stages."""
        tools = {"tool_versions": lambda: self.versions, "carry_out": self.carry_out}
        runtimes = patch.object(evaluation, "check_runtimes", self.check_runtimes)
        with patch.multiple(stages, **tools), runtimes:
            yield

    def check_runtimes(self) -> dict[str, str]:
        self.checked = True
        return {"litert-lm-api": "1"}

    def carry_out(self, job: Job, log: Path, progress: Progress) -> tuple[dict[str, Any], int]:
        assert not any(Path(job.output).iterdir())
        log.write_text(f"noise of {job.stage}\n")
        self.ran.append(job.stage)
        self.jobs[job.stage] = job
        progress(job.stage, 1, 2)
        values = getattr(self, job.stage)(job)
        if job.stage in self.instead:
            self.instead[job.stage](job)
        return values or {}, 5 << 20

    def configure(self, job: Job) -> dict[str, Any]:
        """Settings as the pipeline's: what each stage takes."""
        taken = {"cache_length": 1280, "rotate": True, **job.options["settings"]}
        steps, chip = (
            taken.pop("max_calibration_decode_steps", 32),
            {"soc_model": job.options["chip"]},
        )
        calibrate = {"max_calibration_decode_steps": steps}
        settings = {"export": taken, "calibrate": calibrate, "quantize": {}, "compile": chip}
        config = {**chip, **taken}
        return {"config": config, "settings": settings, "caches": job.options["caches"]}

    def merge(self, job: Job) -> dict[str, Any]:
        made = Path(job.output) / "checkpoint"
        made.mkdir()
        (made / "config.json").write_text("{}")
        return {"notes": []}

    round = merge

    def export(self, job: Job) -> dict[str, Any]:
        write(job.model, FLOAT)
        return {"rotated": self.rotated}

    def check(self, job: Job) -> None:
        assert {*job.inputs} == {"exported", "base", "prompts"}

    def calibrate(self, job: Job) -> None:
        read = hashlib.sha256(Path(job.inputs["prompts"]).read_bytes()).hexdigest()
        (Path(job.output) / "ranges.json").write_text(read)

    def quantize(self, job: Job) -> dict[str, Any]:
        write(job.model, QUANTIZED)
        return {"notes": ["put back: metadata"]}

    def narrow(self, job: Job) -> None:
        shutil.copyfile(job.inputs["model"], job.model)

    def optimize(self, job: Job) -> dict[str, Any]:
        shutil.copyfile(job.inputs["model"], job.model)
        return {
            "notes": [KEPT, NOTE],
            "signatures": [GAIN],
            "compile_configs": {"prefill_decode": {"compile": True}},
        }

    def evaluate(self, job: Job) -> dict[str, Any]:
        """The checkpoint finds every token as likely as one of 2, the bundle as one of 4."""
        own = [[math.log(chance)] * 2 for chance in (0.5, 0.25)]
        scores = [
            ModelScore.of(name, one, own[0]) for name, one in zip(job.inputs, own, strict=True)
        ]
        return asdict(Evaluation(scores, len(job.options["parts"])))

    def emulate(self, job: Job) -> dict[str, Any]:
        """The same on the CPU, and a little worse in the emulator."""
        reference = [math.log(0.5)] * 8
        scores: list[ModelScore] = []
        for name, kl in zip((*job.inputs, "converted"), (0.0, 0.1, self.npu_kl), strict=True):
            one = ModelScore.of(name, [math.log(0.5) - kl] * 8, reference)
            scores.append(replace(one, on_npu=len(scores) == 2, top1_agreement=1.0, kl=kl))
        return asdict(Evaluation(scores, 1))

    def compile(self, job: Job) -> None:
        write(job.model, COMPILED)


def at_once(job: Job, log: Path, progress: Progress) -> tuple[dict[str, Any], int]:
    """Carry out a stage as it is, without a process of its own."""
    return STAGES[job.stage](job, progress), 0


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
        defaults = {
            "soc": "SM8750",
            "sdk": self.sdk,
            "prompts": self.prompts,
            "output": self.output,
        }
        with stages.in_place():
            return stages, build(
                source or self.checkpoint, **{**defaults, "overwrite": True, **options}
            )
