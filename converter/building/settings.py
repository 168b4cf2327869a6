"""The settings of a build that users may change, checked without loading litert-torch, which takes half a minute.

Their names and defaults are in `settings.toml`.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from edge_opt.base.errors import UsageError, unknown
from edge_opt.building.prompts import check_lengths
from edge_opt.building.rings import SETTING
from edge_opt.building.source import Given, Kind

_DATA = tomllib.loads((resources.files(__package__) / "settings.toml").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = _DATA["defaults"]
NAMES: tuple[str, ...] = (*DEFAULTS, *_DATA["others"])
# Settings that cannot be set, and why.
FIXED = {
    "model_id": "it follows from the input",
    "model": "it follows from the input",
    "backend": "it follows from --soc",
    "soc_model": "it follows from --soc",
    "calibration_dataset_dir": "it follows from --prompts",
    "calibration_dataset_format": "it follows from --prompts",
    "calibration_eval_task_names": "it follows from --prompts",
    "overwrite": "it follows from the work folder",
    "weight_quantization_recipe": "it follows from --weights",
    "quantization_recipe": "it follows from --weights",
    "enable_formatting": "it follows from the tokenizer's chat template",
    "export_vision_encoder": "with it, litert-torch exports no embedder for whole prompts",
}
FILES = ("_path", "_dir", "_litertlm", "_files")


def check_settings(given: Given, settings: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown or invalid setting, or if a checkpoint's lengths do not fit each other."""
    for name, value in settings.items():
        _check(name, value)
    if given.kind is Kind.CHECKPOINT:
        values = {**DEFAULTS, **settings}
        lengths = values["prefill_lengths"]
        if not lengths or any(type(one) is not int or one < 1 for one in lengths):
            raise UsageError(
                f"--set prefill_lengths: {json.dumps(lengths)} must be a list of lengths, such as [128]"
            )
        check_lengths(lengths, values["cache_length"])
    elif SETTING in settings:
        raise UsageError(f"--set {SETTING}: the bundle has its caches already, leave it out")


def _check(name: str, value: Any) -> None:
    if name in FIXED or name.endswith(FILES):
        raise UsageError(f"--set {name} cannot be set: {FIXED.get(name, FIXED['overwrite'])}")
    if name not in NAMES:
        raise unknown("--set: setting", name, NAMES)
    default = DEFAULTS.get(name, value)
    kinds = (int, float) if type(default) is float else (type(default),)
    if type(value) not in kinds:
        raise UsageError(
            f"--set {name}: {json.dumps(value)} must have the type of {json.dumps(default)}"
        )
    if name in DEFAULTS and kinds[0] is int and not 0 < value < math.inf:
        raise UsageError(f"--set {name}: {json.dumps(value)} must be a number above 0")
