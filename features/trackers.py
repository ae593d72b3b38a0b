"""Trackers: --report_to also sends the metrics to tensorboard, wandb or trackio."""

import atexit
import importlib
from dataclasses import asdict, dataclass

from features.feature import Feature, flag, refuse

TRACKERS = ("tensorboard", "wandb", "trackio")               # also the names of their pip packages


@dataclass(frozen=True)
class Flags:
    report_to: str = flag("none", "also send the metrics to this tracker",
                          choices=("none", *TRACKERS), section="a tracker")


class Trackers(Feature):
    flags = Flags

    @classmethod
    def on(cls, settings):
        return settings.report_to != "none"

    def __init__(self, learner):
        super().__init__(learner)
        self.write = None
        try:                             # before the first rollout batch
            self.package = importlib.import_module(self.settings.report_to)
        except ImportError as error:
            refuse(self.settings, "report_to", f"cannot be used: {error}")

    def report(self, folder, record):
        self.write = self.write or start(self.package, self.settings, folder, record["step"])
        self.write(flat(record), record["step"])


def start(package, settings, folder, step):
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
