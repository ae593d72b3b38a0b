"""Trackers: --report_to also sends the metrics to tensorboard, wandb or trackio."""

import atexit
import importlib
import sys
from dataclasses import asdict, dataclass

from features.feature import Feature, flag
from plumbing.data.reward_functions import describe
from plumbing.refusal import Refusal

TRACKERS = ("tensorboard", "wandb", "trackio")               # also the names of their pip packages


@dataclass(frozen=True)
class Flags:
    report_to: str | None = flag(None, "also send the metrics to this tracker", unset="none",
                                 choices=TRACKERS, package=dict(zip(TRACKERS, TRACKERS)),
                                 section="a tracker",
                                 also="wandb log_with tracker logger")


class Trackers(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.report_to is not None

    def __init__(self, run):
        self.settings = run.settings
        self.write = None
        self.warned = False

    def report(self, folder, record):
        """A tracker that does not start ends the run, in one line; one that fails later costs it
        nothing."""
        name = self.settings.report_to
        numbers = flat(record)
        try:
            self.write = self.write or start(self.settings, folder, record["step"])
            self.write(numbers, record["step"])
        except (Exception, SystemExit) as error:             # whatever the package raises
            if self.write is None:
                raise Refusal(f"--report_to {name} does not start: {describe(error)}") from error
            if not self.warned:
                sys.stderr.write(f"train.py: warning: --report_to {name} raised {describe(error)}: "
                                 f"it may lack values that {folder}/metrics.jsonl has\n")
            self.warned = True


def start(settings, folder, step):
    """The function (numbers by name, step) that reports. The run starts or continues with batch
    `step`."""
    if settings.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(folder / "tensorboard", purge_step=step)

        def write(numbers, now):
            for name, value in numbers.items():
                writer.add_scalar(name, value, now)
            writer.flush()
        return write
    package = importlib.import_module(settings.report_to)
    package.init(project="gspo", name=folder.name, config=asdict(settings))
    atexit.register(package.finish)
    return lambda numbers, now: package.log(numbers, step=now)


def flat(record):
    """{name: number} of a metrics record. An entry of a dict, list or tuple is named name/key.
    None, text and the values per mini-batch are left out."""
    numbers = {}
    for name, value in record.items():
        inner = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        if isinstance(inner, dict) and name != "minibatches":
            numbers |= {f"{name}/{key}": number for key, number in flat(inner).items()}
        elif isinstance(value, (int, float)):
            numbers[name] = value
    return numbers
