"""The child process that runs the native runtime: `python -m edge_opt.proof.worker PARENT_PID SOCKET`.

It takes framed requests and answers them on a socket of its own, so that nothing that is printed here, by the runtime
or at the interpreter's start, can be taken for an answer. It never outlives its parent, and writes no file.
"""

import os
import resource
import signal
import socket
import sys
import threading
import time

from edge_opt.proof.protocol import frame, receive, send

_PARENT_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 5


def main() -> None:
    """Serves requests until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    parent, channel = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        from edge_opt.proof import native  # noqa: PLC0415 - a runtime that cannot be loaded is an answer, too
    except Exception as error:
        send(channel, frame({"reason": f"{type(error).__name__}: {error}"}, {}))
        return
    send(channel, frame({}, {}))
    while True:
        try:
            header, arrays = receive(channel)
        except EOFError:
            return
        _limit(resource.RLIMIT_DATA, header["memory_limit"])
        # Ends this process even if the runtime never gives control back and the parent is gone.
        signal.alarm(int(header["time_limit"]) + _GRACE_SECONDS)
        pieces = native.answer(header, arrays)
        signal.alarm(0)
        send(channel, pieces)


def _limit(what: int, value: int) -> None:
    """Sets the soft limit only, so that the next request may have a higher one."""
    _, hard = resource.getrlimit(what)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (soft, hard))


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
