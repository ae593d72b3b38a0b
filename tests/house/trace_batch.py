"""One rollout batch of train.py, traced: how many files it passes through, and how many
distinct calls from one file into another. python tests/house/trace_batch.py [-v]

Counted with sys.setprofile while train.train() runs one batch of a tiny mixture of experts and
writes its checkpoint, once the plain way (rollout.py) and once the fast one.
tests/house/test_lesson.py compares with the table below.

With `train.py --plain` a batch and its checkpoint pass through 14 files. B responses of T tokens, b
in a mini-batch, R rewards:

    π_old writes responses    rollout.py             Sampler.sample().response_ids   [B, T]
    rewards                   plumbing/data/task.py  Task.reward_components()        [B, R]
    log π_old                 rollout.py             response_logp().logp            [B, T]
    advantages (GSPO eq. 6)   advantages.py          group_advantages()              [B]
    sequence ratio (eq. 7)    ratios.py              sequence_ratio()                [b]
    clip                      losses.py              token_surrogate()[0]            [b, T]
    loss                      losses.py              policy_loss()[0]                []
    a line of metrics.jsonl   session/metrics.py     batch_record()                  numbers
"""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2]) + "/"
sys.path[:0] = [ROOT, ROOT + "tests"]

import train  # noqa: E402
from tiny_run import TINY  # noqa: E402


def ours(frame):
    """The file of a frame, relative to the project; None if it is not one of ours, or a test's
    (conftest.py replaces os.fsync)."""
    file = frame.f_code.co_filename
    name = file.removeprefix(ROOT)
    return None if name == file or name.startswith((".ci/", ".venv/", "venv/", "tests/")) else name


def trace(flags, wanted=()):
    """Of one batch: (files, distinct calls between files, those from train.py, the files, what the
    wanted functions first returned, {(file, name): result} in their order)."""
    edges, files, returned, inside = set(), set(), {}, False

    def hook(frame, event, result):
        nonlocal inside
        here = ours(frame)
        place = (here, frame.f_code.co_name)
        if event == "return" and inside and place in wanted and result is not None:
            returned.setdefault(place, result)
        if place == ("train.py", "train") and event in ("call", "return"):
            inside = event == "call"
        if inside and here is not None and event == "call":
            count(frame, here)

    def count(frame, here):
        files.add(here)
        caller = frame.f_back
        while caller is not None and ours(caller) is None:
            caller = caller.f_back
        if caller is not None and ours(caller) != here:
            edges.add((ours(caller), caller.f_code.co_name, here, frame.f_code.co_name))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(hook)
        try:
            train.main([*TINY, "--steps", "1", "--output_dir", os.path.join(folder, "run"),
                        *flags])
        finally:
            sys.setprofile(None)
    from_train = {edge[2:] for edge in edges if edge[0] == "train.py"}
    return len(files), len(edges), len(from_train), sorted(files), returned


if __name__ == "__main__":
    for flags in (["--plain"], []):
        files, edges, direct, names, _ = trace(flags)
        print(f"{' '.join(flags) or 'fast':8} {files} files, {edges} calls between files, "
              f"{direct} of them from train.py", *(names if "-v" in sys.argv else []))
