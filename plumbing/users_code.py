"""Users' code that runs in the process of the run: batch reward functions, environments, samplers.

It may call os.chdir: the paths of a run are relative to the folder in which the run was started,
where its worker processes start, too. It may not take from the run what saves the weights.
"""

import os
import shutil
import subprocess
from contextlib import ContextDecorator, suppress

from plumbing.refusal import Refusal

left_in = {}             # {folder of the run: the folder in which users' code was last}


class UsersCode(ContextDecorator):
    """The block, or the function that it decorates, runs the code that a flag names: in the folder
    where such code was last, or in that of the run if it loads a file. The run goes on in its own.

    Raises Refusal at the end of a block that has set functions of os, shutil or subprocess to None,
    as guards around generated programs do, after giving them back."""

    def __init__(self, flag, loads=False):
        self.flag = flag
        self.loads = loads

    def __enter__(self):
        self.home = os.getcwd()
        self.before = [(module, dict(vars(module))) for module in (os, shutil, subprocess)]
        if not self.loads:
            with suppress(OSError):                          # it is deleted
                os.chdir(left_in.get(self.home, self.home))

    def __exit__(self, error_type, error, trace):
        lost = [(module, name, value) for module, values in self.before if vars(module) != values
                for name, value in values.items() if callable(value) and not vars(module).get(name)]
        for one in lost:
            setattr(*one)
        with suppress(OSError):
            left_in[self.home] = os.getcwd()
        os.chdir(self.home)
        if lost and error is None:
            names = ", ".join(f"{module.__name__}.{name}" for module, name, _ in lost[:3])
            raise Refusal(f"{self.flag} has set {names}{' …' * (len(lost) > 3)} to None, which "
                          "the run needs to save its weights: call such a guard in a process of "
                          "its own, or in a function of one response")
