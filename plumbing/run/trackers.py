"""Trackers: --report_to sends what metrics.jsonl holds to tensorboard, wandb or trackio as well."""

import atexit
import importlib
import importlib.util
from dataclasses import asdict

TRACKERS = ("tensorboard", "wandb", "trackio")               # each has the name of its pip package
OPEN = {}                                                    # the run at work and its tracker


def check(name):
    """ValueError if the package of a tracker is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--report_to {name} needs a package that is missing: pip install {name}")


def report(args, folder, record):
    """Send the numbers of a metrics record to the tracker that --report_to names, if any."""
    if args.report_to is None:
        return
    if OPEN.get("run") is not args:
        OPEN.update(run=args, write=start(args, folder, record["step"]))
    OPEN["write"](flat(record), record["step"])


def start(args, folder, step):
    """A function (numbers by name, step) for a run that begins, or goes on, with batch `step`."""
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
    """{name: number} of a record: what is in a dict or a list becomes name/key, what is None or
    text is left out, and so are the mini-batches."""
    found = {}
    for name, value in record.items():
        inner = {str(i): x for i, x in enumerate(value)} if isinstance(value, list) else value
        if isinstance(inner, dict):
            found |= {f"{name}/{key}": number for key, number in flat(inner).items()}
        elif isinstance(value, (int, float)):
            found[name] = value
    return {name: number for name, number in found.items() if not name.startswith("minibatches/")}
