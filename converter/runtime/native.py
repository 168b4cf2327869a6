"""The child process that runs the native runtime: `python -m edge_opt.runtime.native PARENT_PID`.

Only this process may import the module. It takes requests and answers them on a socket, its standard input, so that
nothing printed by the runtime or at the interpreter's start can be mistaken for an answer. It never outlives its
parent and writes no files. The runtime's exceptions become `DeclinedError`, with the same text.
"""

import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from edge_opt.base.processes import begin_child, limit
from edge_opt.base.record import from_dict
from edge_opt.base.words import numbered
from edge_opt.runtime import inputs, loop
from edge_opt.runtime.protocol import (
    Array,
    Arrays,
    DeclinedError,
    Header,
    RunModel,
    check_types,
    receive,
    send,
)
from edge_opt.runtime.tensors import MAIN, Kernels

_RESOLVERS = {"xnnpack": OpResolverType.BUILTIN, "reference": OpResolverType.BUILTIN_REF}
_GRACE_SECONDS = 5


def main() -> None:
    """Serve requests until the other end of the socket is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    begin_child()
    channel = socket.socket(fileno=0).makefile("rwb")
    send(channel, {}, {})
    while True:
        try:
            header, arrays = receive(channel)
        except EOFError:
            return
        limit(resource.RLIMIT_DATA, header["memory_limit"])
        # Ends this process even if the runtime never returns and the parent is gone.
        signal.alarm(int(header["time_limit"]) + _GRACE_SECONDS)
        try:
            send(channel, *_carried_out(header, arrays))
        except OSError:
            raise
        except DeclinedError as error:
            send(channel, {"error": "refused", "reason": str(error)}, {})
        except MemoryError:
            send(channel, {"error": "refused", "reason": "out of memory"}, {})
        except Exception:
            send(channel, {"error": "internal", "reason": traceback.format_exc()}, {})
        signal.alarm(0)


class Session:
    """A model that stays loaded while its signatures are run: its variables are 0 at first, and keep their values.

    A model without signatures has subgraph 0 as `main`. Opening it allocates nothing.

    Raises:
        DeclinedError: the runtime cannot read the model.
    """

    def __init__(self, model: Path | bytes, kernels: Kernels = "xnnpack", where: str = "") -> None:
        self._where = where
        options = {"experimental_op_resolver_type": _RESOLVERS[kernels]}
        if isinstance(model, bytes):
            options["model_content"] = model
        else:
            options["model_path"] = os.fsencode(model)  # a name may not be UTF-8
        with _refusals(where):
            interpreter = Interpreter(**options)
            keys = interpreter.get_signature_list()
            self._runners = {key: interpreter.get_signature_runner(key) for key in keys}
            self._runners = self._runners or {MAIN: _Main(interpreter)}

    def inputs(self) -> list[str]:
        """The names of the first signature's inputs."""
        with _refusals(self._where):  # of types that numpy lacks
            return list(next(iter(self._runners.values())).get_input_details())

    def run(self, signature: str | None, values: Arrays) -> Arrays:
        """Run a signature (None: the model's only one) and return its outputs.

        Raises:
            DeclinedError: the runtime cannot run the signature, or the model does not have it.
        """
        names = list(self._runners)
        where = self._where
        if signature is None and len(names) == 1:
            signature = names[0]
        elif where:
            where += f", signature '{signature}'"
        if signature not in names:
            raise DeclinedError(
                f"no signature '{signature}', there is {', '.join(map(repr, names))}"
            )
        with _refusals(where):
            results = dict(self._runners[signature](**values))
        check_types(results)
        return results


class _Main:
    """Subgraph 0 of a model without signatures, with the interface of the runtime's signature runners.

    Tensors without a name, or with the name of another one, are numbered.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def get_input_details(self) -> dict[str, Any]:
        return _named(self._interpreter.get_input_details())

    def __call__(self, **values: Any) -> Arrays:
        interpreter = self._interpreter
        expected = self.get_input_details()
        if set(expected) != set(values):
            raise ValueError(f"inputs {sorted(values)} given, {sorted(expected)} expected")
        for name, detail in expected.items():
            if values[name].shape != tuple(detail["shape"]):
                interpreter.resize_tensor_input(detail["index"], values[name].shape)
        interpreter.allocate_tensors()
        for name, detail in expected.items():
            interpreter.set_tensor(detail["index"], values[name])
        interpreter.invoke()
        outputs = _named(interpreter.get_output_details()).items()
        return {name: self._read(detail) for name, detail in outputs}

    def _read(self, detail: dict[str, Any]) -> Array:
        """A tensor's numbers. The interpreter has no buffer for a tensor without elements, and says so."""
        if 0 in detail["shape"]:
            return np.empty(detail["shape"], detail["dtype"])
        numbers: Array = self._interpreter.get_tensor(detail["index"])
        return numbers


def _named(details: list[Any]) -> dict[str, Any]:
    names = numbered([detail["name"] for detail in details])
    return dict(zip(names, details, strict=True))


@contextmanager
def _refusals(where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, TypeError, MemoryError) as error:
        words = " ".join(str(error).split())[:600] or f"no reason given ({type(error).__name__})"
        if words == "Invalid data-type for array":
            words = "numpy lacks the type of an output, such as bfloat16: add a CAST to FLOAT32"
        raise DeclinedError(f"{where}: {words}" if where else words) from error


def _carried_out(header: Header, arrays: Arrays) -> tuple[Header, Arrays]:
    paths = header["models"]

    @cache
    def session(name: str, kernels: Kernels) -> Session:
        return Session(Path(paths[name]), kernels, f"{name} model" if len(paths) > 1 else "")

    def invoke(call: loop.Call, values: Arrays) -> Arrays:
        return session(call.model, header["kernels"]).run(call.signature.name, values)

    def run_model(name: str, kernels: Kernels, values: Sequence[Array]) -> list[Array]:
        opened = session(name, kernels)
        named = dict(zip(opened.inputs(), values, strict=True))
        return list(opened.run(None, named).values())

    match header["operation"]:
        case "run":
            results: Arrays = {}
            calls = from_dict(list[inputs.Planned], header["calls"])
            for number, (signature, plans) in enumerate(calls):
                made = {planned.info.name: inputs.array_of(planned) for planned in plans}
                # A call without plans takes the arrays of the request.
                outputs = session(MAIN, header["kernels"]).run(signature, made or arrays)
                results |= {f"{number}/{name}": array for name, array in outputs.items()}
            return {}, results
        case "generate":
            return {}, {"logits": loop.run(from_dict(loop.Loop, header["loop"]), invoke)}
    module, name = header["function"]
    function: Callable[[Any, RunModel], Any] = getattr(import_module(module), name)
    argument = from_dict(get_type_hints(function)["asked"], header["asked"])
    return {"answer": function(argument, run_model)}, {}


if __name__ == "__main__":
    main()
