"""Protects child processes from the signals that stop a program."""

import signal


def ignore_stop_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP in this process. The process that started this process ends it.

    Terminals and service managers send these signals to all processes of a program.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
