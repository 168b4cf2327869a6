"""For scripts that tests start and send signals to: as in a terminal, whatever the tests themselves run under.

Under `nohup`, or in the background of a shell script, signals are ignored, and children inherit that.
"""

import signal


def restore() -> None:
    """Nothing is ignored; Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
