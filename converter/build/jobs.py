"""What a stage is told and what it answers, as plain values: another process carries it out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Progress = Callable[[str, int, int], None]

MODEL = "model.litertlm"
"""What a stage that makes a bundle calls it, in its folder."""


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

    def to_dict(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Job:
        """What `to_dict` gave."""
        return cls(**told)

    @property
    def model(self) -> Path:
        """The bundle that it makes."""
        return Path(self.output) / MODEL


@dataclass(frozen=True, slots=True)
class Carried:
    """A stage that was carried out: the memory of its largest process in bytes, and what it says."""

    told: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None


class Toolchain(Protocol):
    """Carries stages out: litert-torch's and ours, or a test's small functions."""

    def versions(self) -> dict[str, str]:
        """Of everything that a stage's result depends on.

        Raises:
            UsageError: something is not installed, or in a version that is not known here.
        """

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> Carried:
        """Run one stage; what its tools print goes to `log`, what they leave lying about to the folder `scratch`.

        Raises:
            EdgeOptError: it failed; the message is the cause alone.
        """
