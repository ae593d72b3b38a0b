"""A run with the flags of train.py, by TRL: python benchmarks/trl_run.py FLAGS OF TRAIN.PY

Prints one JSON line: the seconds of each step (rollout, log-probs and update) and the peak of GPU
memory. The GRPOConfig is that of `python tools/export.py trl`; the prompts, the verifier and the checkpoint
are those of the flags.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from plumbing.data.tasks import from_arguments  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from plumbing.parallel.devices import kind_of  # noqa: E402
from tools import trl  # noqa: E402
from tools.export import keys_of  # noqa: E402


class Clock(TrainerCallback):
    """A TrainerCallback that records the seconds between the beginnings of rollout batches."""

    def __init__(self, every):
        self.every = every
        self.times = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.times.append(time.perf_counter())

    def on_train_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())


def main(argv):
    args = parse(argv)
    task = from_arguments(args)
    cuda = kind_of(args) == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, padding_side="left")
    problems = task.train[:args.steps * args.prompts_per_step]
    encoded = task.encode(tokenizer, problems, args.chat_template, args.max_prompt_length)
    asked = dict(zip(map(tokenizer.decode, encoded), problems))

    def reward(prompts, completions, **columns):
        return [float(task.verify(text, asked[prompt]))
                for prompt, text in zip(prompts, completions)]

    with tempfile.TemporaryDirectory() as folder:
        fixed = dict(output_dir=folder, report_to="none", save_strategy="no", use_cpu=not cuda,
                     disable_tqdm=True, model_init_kwargs={"dtype": "float32"})
        config = GRPOConfig(**keys_of(trl, args) | fixed)
        clock = Clock(args.steps_per_generation)
        rows = Dataset.from_list([{"prompt": prompt} for prompt in asked])
        trainer = GRPOTrainer(args.model_name_or_path, reward, config, rows,
                              processing_class=tokenizer, callbacks=[clock])
        trainer.train()
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:])]
    peak = torch.cuda.max_memory_allocated() if cuda else None
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(print(__doc__))
    main(sys.argv[1:])
