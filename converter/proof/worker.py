"""The child process that runs the native runtime: `python -m edge_opt.proof.worker PARENT_PID REPLY_DESCRIPTOR`.

Takes framed requests on standard input and answers on a pipe of its own, so that nothing that is printed here, by the
runtime or at the interpreter's start, can be taken for an answer. It never outlives its parent, and writes no file.
"""

import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType

from edge_opt.proof import inputs, loop, pair
from edge_opt.proof.plain import from_plain
from edge_opt.proof.protocol import Array, Arrays, FrameError, Header, frame, read_frame
from edge_opt.proof.tensors import Kernels

_PARENT_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 5
_Answer = tuple[Header, Arrays]


def main() -> None:
    """Serves requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    parent, replies = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        from edge_opt.proof import native  # noqa: PLC0415 - a runtime that cannot be loaded is an answer, too
    except Exception as error:
        _write(replies, {"error": "unavailable", "reason": f"{type(error).__name__}: {error}"}, {})
        return
    _write(replies, {"ready": True}, {})
    while True:
        try:
            header, arrays = read_frame(partial(_fill, 0))
        except EOFError:
            return
        _write(replies, *_answer(native, header, arrays))


def _answer(native: ModuleType, header: Header, arrays: Arrays) -> _Answer:
    _limit(resource.RLIMIT_DATA, header["memory_limit"])
    # Ends this process even if the runtime never gives control back and the parent is gone.
    signal.alarm(int(header["time_limit"]) + _GRACE_SECONDS)
    try:
        reply, results = _OPERATIONS[header["operation"]](native, header, arrays)
        # Names a tensor whose elements cannot be passed on before half of the answer is out.
        list(frame(reply, results))
    except native.RefusedError as error:
        return {"error": "refused", "reason": str(error)}, {}
    except native.MissingError as error:
        return {"error": "missing", "reason": str(error)}, {}
    except FrameError as error:
        return {"error": "refused", "reason": str(error)}, {}
    except MemoryError:
        return {"error": "refused", "reason": "out of memory"}, {}
    except Exception:
        return {"error": "internal", "reason": traceback.format_exc()}, {}
    finally:
        signal.alarm(0)
    return reply, results


def _describe(native: ModuleType, header: Header, _: Arrays) -> _Answer:
    return {"signatures": [asdict(signature) for signature in native.describe(Path(header["path"]))]}, {}


def _run(native: ModuleType, header: Header, arrays: Arrays) -> _Answer:
    session = native.Session(Path(header["path"]), header["kernels"])
    results: Arrays = {}
    for number, listed in enumerate(header["plans"]):
        plans = [from_plain(inputs.InputPlan, fields) for fields in listed or ()]
        given = {made.info.name: inputs.array_of(made) for made in plans} or arrays
        outputs = session.run(header["signature"], given)
        results.update({f"{number}/{name}": array for name, array in outputs.items()})
    return {}, results


def _prove(native: ModuleType, header: Header, arrays: Arrays) -> _Answer:
    models = {version: arrays[version].tobytes() for version in pair.VERSIONS}
    described = []
    for version, model in models.items():
        with _within(version, native):
            described += native.describe(model)

    def run(version: str, kernels: Kernels, inputs: Arrays) -> list[Array]:
        with _within(version, native):
            session = native.Session(models[version], kernels)
            return list(session.run(None, inputs).values())

    first, second = described
    found = pair.prove((first, second), from_plain(pair.ProofRequest, header["request"]), run)
    return {"proof": asdict(found)}, {}


def _generate(native: ModuleType, header: Header, _: Arrays) -> _Answer:
    sessions = {}
    for name, path in header["models"].items():
        with _within(name, native):
            sessions[name] = native.Session(Path(path), header["kernels"])

    def invoke(call: loop.Call, inputs: Arrays) -> Arrays:
        with _within(f"{call.model} model, signature '{call.signature.name}'", native):
            found: Arrays = sessions[call.model].run(call.signature.name, inputs)
            return found

    tokens, logits = loop.run(from_plain(loop.Loop, header["loop"]), invoke)
    return {"tokens": tokens}, {"logits": logits}


def _fill_caches(native: ModuleType, header: Header, _: Arrays) -> _Answer:
    session = native.Session(Path(header["path"]), "xnnpack")
    call = from_plain(loop.Call, header["call"])
    chunks = [from_plain(loop.Chunk, fields) for fields in header["chunks"]]
    return {}, loop.fill(call, chunks, lambda call, values: session.run(call.signature.name, values))


@contextmanager
def _within(where: str, native: ModuleType) -> Iterator[None]:
    """A refusal says where."""
    try:
        yield
    except native.RefusedError as error:
        raise native.RefusedError(f"{where}: {error}") from error


_OPERATIONS = {
    "describe": _describe,
    "run": _run,
    "prove": _prove,
    "generate": _generate,
    "fill": _fill_caches,
}


def _limit(what: int, value: int) -> None:
    """Sets the soft limit only, so that the next request may have a higher one."""
    _, hard = resource.getrlimit(what)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (soft, hard))


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _fill(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.readv(descriptor, [view[done:]])
        if count == 0:
            raise EOFError
        done += count


def _write(descriptor: int, header: Header, arrays: Arrays) -> None:
    for piece in frame(header, arrays):
        done = 0
        while done < len(piece):
            done += os.write(descriptor, piece[done:])


if __name__ == "__main__":
    main()
