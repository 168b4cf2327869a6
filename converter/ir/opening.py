"""Opens what users give as a model: a .tflite file, its bytes, a loaded model, or a bundle, which holds several."""

import os

from edge_opt.ir.compiled import check_not_compiled
from edge_opt.ir.model import Model
from edge_opt.ir.read import load
from edge_opt.output.errors import UsageError
from edge_opt.schema.bundle import open_bundle

ModelLike = str | os.PathLike[str] | bytes | Model

MAIN_SECTION, EMBEDDER_SECTION, AUXILIARY_SECTION = "prefill_decode", "embedder", "aux"
"""What models of a LiteRT-LM bundle are for, as their sections say."""


class Opened:
    """A model alone, or a .litertlm or .task bundle; each model is read when it is first needed.

    `bundle` is None for a model alone. `kinds` says by its index in the bundle what each model is for; that of a model
    alone is {0: ""}.

    Raises:
        ModelFormatError: the file is a damaged bundle.
    """

    def __init__(self, source: ModelLike) -> None:
        self.source = source
        self.path = None if isinstance(source, bytes | Model) else os.fspath(source)
        self.bundle = None if self.path is None else open_bundle(self.path)
        self.kinds = {0: ""} if self.bundle is None else self.bundle.models
        self._models = {0: source} if isinstance(source, Model) else dict[int, Model]()

    def model(self, index: int) -> Model:
        """The model at an index of `kinds`.

        Raises:
            ModelFormatError: it is no valid model.
        """
        if index not in self._models:
            assert not isinstance(self.source, Model)
            content = self.source if self.bundle is None else self.bundle.content(index)
            self._models[index] = load(content)
        return self._models[index]

    def find(self, kind: str) -> Model | None:
        """The model of a bundle that is for `kind`; None where there is none."""
        return next((self.model(index) for index in self.kinds if self.kinds[index] == kind), None)

    def main(self, *, compiled: bool = False) -> Model:
        """The model alone, or a bundle's prefill/decode model; one that is compiled for an NPU only if `compiled`.

        Raises:
            ModelFormatError: it is no valid model.
            UsageError: the bundle has no such model, or it is compiled.
        """
        model = self.model(0) if self.bundle is None else self.find(MAIN_SECTION)
        if model is None:
            held = ", ".join(kind or "unnamed" for kind in self.kinds.values()) or "none"
            raise UsageError(f"{self.path} has no {MAIN_SECTION} model, its models are: {held}")
        if not compiled:
            check_not_compiled(model, self.path)
        return model
