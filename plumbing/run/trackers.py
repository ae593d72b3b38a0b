"""Trackers: --report_to also sends the metrics to tensorboard, wandb or trackio."""

import atexit
import importlib
import importlib.util
from dataclasses import asdict

TRACKERS = ("tensorboard", "wandb", "trackio")               # also the names of their pip packages
OPEN = {}                                                    # the current run and its tracker


def check(name):
    """Raise ValueError if the package of a tracker is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--report_to {name} needs a package that is not installed: pip install "
                         f"{name}")


def report(args, folder, record):
    """Send the numbers of a metrics record to the tracker of --report_to, if there is one."""
    if args.report_to is None:
        return
    if OPEN.get("run") is not args:
        OPEN.update(run=args, write=start(args, folder, record["step"]))
    OPEN["write"](flat(record), record["step"])


def start(args, folder, step):
    """The function (numbers by name, step) that reports. The run starts or continues with batch
    `step`."""
    if args.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(folder / "tensorboard", purge_step=step)

        def write(numbers, now):
            for name, value in numbers.items():
                writer.add_scalar(name, value, now)
            writer.flush()
        return write
    package = importlib.import_module(args.report_to)
    package.init(project="gspo", name=folder.name, config=asdict(args))
    atexit.register(package.finish)
    return lambda numbers, now: package.log(numbers, step=now)


def flat(record):
    """{name: number} of a metrics record. An entry of a dict, list or tuple is named name/key.
    None, text and the values per mini-batch are left out."""
    numbers = {}
    for name, value in record.items():
        several = isinstance(value, (list, tuple))
        inner = {str(i): x for i, x in enumerate(value)} if several else value
        if isinstance(inner, dict):
            numbers |= {f"{name}/{key}": number for key, number in flat(inner).items()}
        elif isinstance(value, (int, float)):
            numbers[name] = value
    return {name: number for name, number in numbers.items() if not name.startswith("minibatches/")}
