"""The native runtime, and what is asked of it; only the worker process may import this module.

Whatever the runtime raises becomes `DeclinedError` with its own words, so that the caller need not know its exceptions.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from edge_opt.base.record import from_dict
from edge_opt.runtime import inputs, loop, pair
from edge_opt.runtime.protocol import Array, Arrays, Header, MessageError, send
from edge_opt.runtime.tensors import MAIN, Kernels, SignatureInfo, TensorInfo

ModelContent = Path | bytes

_RESOLVERS = {
    "xnnpack": OpResolverType.BUILTIN,
    "reference": OpResolverType.BUILTIN_REF,
}
_Answer = tuple[Header, Arrays]


class DeclinedError(Exception):
    """The runtime does not take a model or its inputs; the text is its reason."""


def answer(channel: Connection, header: Header, arrays: Arrays) -> None:
    """Carries a request out and sends what came of it."""
    try:
        send(channel, *_OPERATIONS[header["operation"]](header, arrays))
    except (DeclinedError, MessageError) as error:
        kind, reason = "refused", str(error)
    except MemoryError:
        kind, reason = "refused", "out of memory"
    except OSError:
        raise
    except Exception:
        kind, reason = "internal", traceback.format_exc()
    else:
        return
    send(channel, {"error": kind, "reason": reason}, {})


class Session:
    """A model that stays loaded while its signatures are run again and again; what it keeps is fresh at the first.

    `signatures` are all that it has; subgraph 0 under the name `main`, run by position, if it has none. Describing a
    model allocates nothing.

    Raises:
        DeclinedError: the runtime cannot read the model.
    """

    def __init__(self, model: ModelContent, kernels: Kernels = "xnnpack", where: str = "") -> None:
        self._where = where
        self._calls: dict[str, Callable[..., Arrays]] = {}
        source = {"model_content": model} if isinstance(model, bytes) else {"model_path": str(model)}
        with _refusals(where):
            self._interpreter = Interpreter(**source, experimental_op_resolver_type=_RESOLVERS[kernels])
            keys = list(self._interpreter.get_signature_list())
            self.signatures = tuple(map(self._described, keys)) or (self._main(),)

    def run(self, signature: str | None, values: Arrays) -> Arrays:
        """One signature's outputs; None means the model's only one.

        Raises:
            DeclinedError: the runtime cannot run it, or does not know it.
        """
        where = f"{self._where}, signature '{signature}'" if self._where and signature else self._where
        names = [info.name for info in self.signatures]
        name = signature or names[0]
        with _refusals(where):
            if name not in names or (signature is None and len(names) > 1):
                raise ValueError(f"no signature '{signature}', there is {', '.join(map(repr, names))}")
            if name not in self._calls:
                positional = self.signatures[0].positional
                call = self._run_main if positional else self._interpreter.get_signature_runner(name)
                if not self._calls:
                    self._interpreter.reset_all_variables()
                self._calls[name] = call
            return dict(self._calls[name](**values))

    def _run_main(self, **values: Array) -> Arrays:
        """Runs subgraph 0 on inputs by the names that its description gives to them."""
        interpreter, (main,) = self._interpreter, self.signatures
        details = interpreter.get_input_details()
        places = {info.name: detail["index"] for info, detail in zip(main.inputs, details, strict=True)}
        if set(places) != set(values):
            raise ValueError(f"inputs {sorted(values)} given, {sorted(places)} expected")
        for info in main.inputs:
            if values[info.name].shape != info.shape:
                interpreter.resize_tensor_input(places[info.name], values[info.name].shape)
        interpreter.allocate_tensors()
        for name, place in places.items():
            interpreter.set_tensor(place, values[name])
        interpreter.invoke()
        results = zip(main.outputs, interpreter.get_output_details(), strict=True)
        return {info.name: interpreter.get_tensor(detail["index"]) for info, detail in results}

    def _main(self) -> SignatureInfo:
        """Subgraph 0: its tensors under their own names, or numbered where two share one."""

        def numbered(details: Sequence[Any]) -> tuple[TensorInfo, ...]:
            names = [detail["name"] for detail in details]
            return tuple(
                _tensor(name if name and names.count(name) == 1 else f"{name}#{place}", detail)
                for place, (name, detail) in enumerate(zip(names, details, strict=True))
            )

        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        return SignatureInfo(MAIN, numbered(inputs), numbered(outputs), positional=True)

    def _described(self, key: str) -> SignatureInfo:
        runner = self._interpreter.get_signature_runner(key)
        inputs, outputs = (
            tuple(_tensor(name, detail) for name, detail in sorted(details.items()))
            for details in (runner.get_input_details(), runner.get_output_details())
        )
        return SignatureInfo(key, inputs, outputs)


@contextmanager
def _refusals(where: str = "") -> Iterator[None]:
    """What the runtime raises, as a refusal that says where."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError, MemoryError) as error:
        words = " ".join(str(error).split())[:600] or f"no reason given ({type(error).__name__})"
        raise DeclinedError(f"{where}: {words}" if where else words) from error


def _tensor(name: str, detail: Any) -> TensorInfo:
    quantization = detail["quantization_parameters"]
    return TensorInfo(
        name=name,
        tensor=detail["name"],
        shape=tuple(int(size) for size in detail["shape"]),
        declared=tuple(int(size) for size in detail["shape_signature"]),
        dtype=np.dtype(detail["dtype"]).name,
        scales=tuple(float(scale) for scale in quantization["scales"]),
        zero_points=tuple(int(zero) for zero in quantization["zero_points"]),
        axis=int(quantization["quantized_dimension"]),
    )


# What a request asks for


def _describe(header: Header, _: Arrays) -> _Answer:
    return {"signatures": Session(Path(header["models"]["main"])).signatures}, {}


def _run(header: Header, arrays: Arrays) -> _Answer:
    session = Session(Path(header["models"]["main"]), header["kernels"])
    results: Arrays = {}
    for number, plans in enumerate(from_dict(list[list[inputs.InputPlan]], header["plans"])):
        given = {planned.info.name: inputs.array_of(planned) for planned in plans} or arrays
        outputs = session.run(header["signature"], given)
        results.update({f"{number}/{name}": array for name, array in outputs.items()})
    return {}, results


def _prove(header: Header, arrays: Arrays) -> _Answer:
    models = {version: arrays[version].tobytes() for version in pair.VERSIONS}
    ((first,), (second,)) = (Session(model, where=version).signatures for version, model in models.items())

    def run(version: str, kernels: Kernels, inputs: Iterable[Arrays]) -> list[list[Array]]:
        session = Session(models[version], kernels, version)
        return [list(session.run(None, given).values()) for given in inputs]

    outcome = pair.prove((first, second), from_dict(pair.ProofRequest, header["request"]), run)
    return {"proof": outcome}, {}


def _generate(header: Header, _: Arrays) -> _Answer:
    models = header["models"].items()
    sessions = {name: Session(Path(path), header["kernels"], f"{name} model") for name, path in models}

    def invoke(call: loop.Call, inputs: Arrays) -> Arrays:
        return sessions[call.model].run(call.signature.name, inputs)

    tokens, logits = loop.run(from_dict(loop.Loop, header["loop"]), invoke)
    return {"tokens": tokens}, {"logits": logits}


def _fill(header: Header, _: Arrays) -> _Answer:
    session = Session(Path(header["models"]["main"]), "xnnpack")
    signature, chunks = from_dict(tuple[SignatureInfo, list[tuple[int, int]]], header["fill"])
    return {}, loop.fill(signature, chunks, lambda call, values: session.run(call.signature.name, values))


_OPERATIONS = {"describe": _describe, "run": _run, "prove": _prove, "generate": _generate, "fill": _fill}
