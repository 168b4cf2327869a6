"""What a stage is told, what it answers, and how it fails; as plain values: another process carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_opt.output.errors import EdgeOptError

MODEL = "model.litertlm"
"""What a stage that makes a bundle calls it, in its folder."""
REPORT = "report"
"""What our own stage calls the reports beside it, one for each format; no later stage depends on them."""


class StageFailedError(EdgeOptError):
    """A tool of a stage failed; `result` has what was done until then."""


class BuildCheckError(EdgeOptError):
    """The compiled bundle is not what it has to be; `result` has what was done until then."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a stage.

    `config` is litert-torch's configuration; None for the stage that makes it. `inputs` are files and folders by what
    they are, `output` is an empty folder for the result, `options` are the stage's own. `libraries` is the folder with
    the vendor's compiler; None where its programs find that themselves.
    """

    stage: str
    output: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    libraries: str | None = None

    @property
    def model(self) -> Path:
        """The bundle that it makes."""
        return Path(self.output) / MODEL


@dataclass(frozen=True, slots=True)
class Carried:
    """A stage that was carried out: the memory of its largest process in bytes, and what it says."""

    told: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
