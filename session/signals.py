"""Signals that stop a run: Ctrl-C, SIGTERM and SIGHUP."""

import os
import signal
import threading
import time
from contextlib import suppress

from plumbing.parallel import processes


class Skip(KeyboardInterrupt):
    """Ends what `unless_stopped` calls. Users' code is written to let a KeyboardInterrupt pass."""


class StopSignals:
    """Inside the block a first signal lets a run that is training complete its rollout batch and
    save it; an evaluation between two batches is left out. A second signal, or one in any other
    phase, stops the run immediately.

    training: whether the run is in its loop. caught: when signals came, in seconds.
    """

    def __init__(self):
        self.training = False
        self.skipping = False                                # whether a signal raises Skip
        self.caught = []
        self.previous = {}                                   # {signal: its handler before}

    def __enter__(self):
        main = threading.current_thread() is threading.main_thread()     # no other may set them
        for name in ("SIGINT", "SIGTERM", "SIGHUP") * main:
            number = getattr(signal, name, None)             # Windows has no SIGHUP,
            handler = number and signal.getsignal(number)
            if number and (name != "SIGHUP" or handler is not signal.SIG_IGN):   # nohup ignores it
                self.previous[number] = handler or signal.SIG_DFL
                signal.signal(number, self.handle)
        return self

    def __exit__(self, error_type, error, trace):
        failed = isinstance(error, Exception)    # torchrun stops the processes beside one that died
        for number, handler in self.previous.items():
            if number == signal.SIGINT or not failed:        # else until the error is printed
                signal.signal(number, handler)

    def unless_stopped(self, call):
        """call(), or None if a signal has come, or comes meanwhile. Several processes, which wait
        for each other, complete it."""
        self.skipping = processes.world() == 1
        try:
            return None if self.skipping and self.caught else call()
        except Skip:
            return None
        finally:
            self.skipping = False

    def handle(self, number, frame):
        self.caught.append(time.monotonic())
        first = len(self.caught) == 1
        if first and self.training:
            if processes.rank() == 0:                        # print could be interrupted in itself
                with suppress(OSError):                      # SIGHUP: the terminal is gone
                    os.write(1, b"\nstopping after this rollout batch, which will be saved (press "
                                b"again to stop immediately, without saving it)\n")
            if self.skipping:
                raise Skip
        elif first or self.caught[-1] - self.caught[0] > 2:  # torchrun repeats a signal immediately
            raise KeyboardInterrupt
