"""One run from its flags to its summary: folder, policy, learner, the loop, and what is printed."""

import time

from plumbing.data import tasks
from plumbing.model.actor import load_trained_policy
from plumbing.model.chat import name_ends
from plumbing.parallel import processes
from session import checkpoints, dry_run, folder as folders, screen
from session.arguments import find_code, format_flags
from session.learner import make_learner
from session.metrics import Recorder
from session.signals import StopSignals


def run_training(settings, task, device, train, held_out):
    """One run on this process's device. task: a Task in place of the one that the flags name, or
    None. train, held_out: those of train.py and eval.py."""
    began = time.perf_counter()
    task = tasks.prepare_task(settings, task)
    with StopSignals() as signals, folders.run_folder(settings) as folder:
        saved = None
        if settings.resume:
            saved = processes.on_first(lambda: checkpoints.find_newest(folder))
        screen.print_once(screen.plan(settings, folder, task, device))
        policy, tokenizer = load_trained_policy(settings, task, device, saved)
        screen.print_once(name_ends(policy, tokenizer))
        screen.print_once(task.filter_prompts(tokenizer))
        checkpoints.seed_all(settings.seed)  # the same critic if the warm-up is cached
        progress = {"bad": 0, "equal": 0, "best_pass_rate": 0.0, "best_score": (), "collapsed": "",
                    "verifier_errors": 0}
        learner = make_learner(settings, task, policy, tokenizer, device)
        if settings.dry_run:
            return dry_run.print_estimate(settings, learner, task, train, held_out, began)
        if not saved:
            progress["before"] = held_out(settings, learner, task)
        # saves the last complete batch if an error ends the next
        with checkpoints.Saver(folder, learner, progress, task, signals) as saver:
            if saved:
                screen.print_once(saver.restore(saved))
            screen.print_once(processes.on_first(
                lambda: folders.begin_run(settings, folder, task, saver.step)))
            if not saved and progress["before"]:
                screen.print_once(f"before: {screen.format_scores(progress['before'])}   "
                                  f"({time.perf_counter() - began:.0f} s)\n")
            recorder = Recorder(folder, task, learner, progress, saver.step)
            train(settings, learner, task, recorder, saver)
        if saver.step < settings.steps or saver.stop():
            resume = {"output_dir": str(folder), "resume": True}
            resume |= find_code(settings.explicit_flags)     # which must be typed again
            screen.print_once(f"stopped after batch {saver.step} and saved; python train.py "
                              f"{format_flags(resume)} continues")
            raise SystemExit(130)
        after = held_out(settings, learner, task)
        recorder.held_out(saver.step, after)
        screen.report(settings, folder, task, progress, after, time.perf_counter() - began)
