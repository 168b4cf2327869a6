"""The child process that runs the native runtime: `python -m edge_opt.runtime.worker PARENT_PID`.

Its standard input is a socket on which it takes requests and answers them, so that nothing that is printed here, by the
runtime or at the interpreter's start, can be taken for an answer. It never outlives its parent, and writes no file.
"""

import resource
import signal
from multiprocessing.connection import Connection

from edge_opt.base.processes import begin_child, limit
from edge_opt.runtime.protocol import receive, send

_GRACE_SECONDS = 5


def main() -> None:
    """Serves requests until the other end of the socket is closed."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    begin_child()
    channel = Connection(0)
    try:
        from edge_opt.runtime import native  # noqa: PLC0415 - a runtime that cannot be loaded is an answer, too
    except Exception as error:
        send(channel, {"reason": f"{type(error).__name__}: {error}"}, {})
        return
    send(channel, {}, {})
    while True:
        try:
            header, arrays = receive(channel)
        except EOFError:
            return
        limit(resource.RLIMIT_DATA, header["memory_limit"])
        # Ends this process even if the runtime never gives control back and the parent is gone.
        signal.alarm(int(header["time_limit"]) + _GRACE_SECONDS)
        native.answer(channel, header, arrays)
        signal.alarm(0)


if __name__ == "__main__":
    main()
