"""Builds an NPU bundle from a checkpoint: runs litert-torch's stages and ours in sequence, resumable.

The build as a whole is `run`, which reads what is given by `source`, `settings` and `needs`:

    recipe         the stages as data: what each reads and makes
    stages         runs a stage in a process of its own (`stage_process`), and keeps its result
    pipeline       litert-torch's stages; `prompts` prepares their input, `rings` plans the caches; `mending`, `masks`,
                   `biases` and `sections` mend their results
    merging        stage: merges a LoRA adapter with its base
    rounding       stage: chooses weights and rounds them to 4 bits, with `network`, `gptq` and `rotation`
    narrowing      stage: stores these weights, and those of the `logits`, in 4 bits
    evaluation     stages: compare a bundle with its checkpoint, on text that was `held_out`, in `litert_lm`
    checkpoint     weights of a checkpoint that stay on disk, for all of these
    doctor         what is installed, for the command of that name
"""

from edge_opt.building.run import BuildResult, build
from edge_opt.building.stages import BuildCheckError, StageFailedError, StageReport

__all__ = ["BuildCheckError", "BuildResult", "StageFailedError", "StageReport", "build"]
