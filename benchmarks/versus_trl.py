"""TRL's GRPOTrainer and this project on the same work: seconds, memory, share of the limit.

    pip install trl==1.16.0
    OMP_NUM_THREADS=2 python benchmarks/versus_trl.py     # --cases default_run: one minute

Both sides run in this process, in turns, on the same weights, prompts, number of completions and
new tokens, optimizer steps, loss (GSPO), dtype and threads. TRL's side is its own generation,
log-prob and loss code under the configuration that `python tools/export.py trl` prints; ours is the
loop of train.py. In cases with a forced length, neither side has an end token and rewards
alternate, so both compute every completion in every update. `default_run` is the built-in task from
the same supervised warm-up, as users run it: responses end by themselves, and both sides learn.

The limit is the matrix-multiply rate of this machine. The share of the limit counts only the least
arithmetic that does the work: the prefix shared by all prompts once, each prompt once per group,
and the LM head only on response positions.
"""

import json
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import rollout  # noqa: E402
import train  # noqa: E402
from make_max_data import make_max_data  # noqa: E402
from plumbing.data import tasks  # noqa: E402
from plumbing.data.datafiles import Problem  # noqa: E402
from plumbing.data.stream import PromptStream  # noqa: E402
from plumbing.data.task import Task  # noqa: E402
from plumbing.model.cold_start import load_cold_start  # noqa: E402
from plumbing.model.policy import load_policy  # noqa: E402
from session.arguments import parse  # noqa: E402
from session.learner import Learner  # noqa: E402
from plumbing.speed import fast  # noqa: E402
from timing import (MB, command_line, in_turns, measure_limit, peak_bytes,  # noqa: E402
                    quotients, rounded, spread, table, write_json)
from tools.export import translate  # noqa: E402

NEVER = 2 ** 31 - 1  # an end token that no model emits, so every completion has its full length
FORCED = "forced length"     # name of the task whose responses all have the largest length
SMOLLM2 = "checkpoints/SmolLM2-135M-Instruct"
find_end_tokens = rollout.end_tokens


class Case(NamedTuple):
    """The same work for both sides. The flags are those of train.py, beside its defaults."""
    title: str
    rounds: int = 2
    tokens: int | None = None            # of every response; None: they end by themselves
    prompt: int | str | None = None      # its tokens, "max", or None: the built-in task's
    model: str = SMOLLM2                 # "": the built-in one after its warm-up
    flags: str = "--prompts_per_step 8 --steps_per_generation 2"


CPU = torch.device("cpu")
CASES = {
    "default_run": Case("the default run, responses end by themselves", 16, model="", flags=""),
    "smollm2_max": Case("SmolLM2-135M, 4-shot `max`, 64 answers", 2, 5, "max"),
    "smollm2": Case("SmolLM2-135M, 64 + 64 tokens, G 8", 2, 64, 64,
                    flags="--prompts_per_step 4 --steps_per_generation 2"),
}


# ------------------------------------------------------------------------------------ the two sides

class Ours:
    """Rollout batches of train.train, one at a time."""

    def __init__(self, settings, task, folder):
        self.task = task
        policy, self.tokenizer = load_policy(settings, task, CPU, folder)
        self.learner = Learner(settings, task, policy, self.tokenizer, CPU)
        self.learner.schedule = lambda updates: 1.0          # a constant learning rate

    def seconds(self, numbers, step):
        """Seconds of a batch with the problems of these numbers. With a forced length without the
        pass that the metrics need, which TRL does not make."""
        self.learner.stream = SimpleNamespace(next=lambda *_: numbers)
        batch, mini, _, times = train.train_batch(self.learner, step)
        if ends_naturally(self.task):
            self.learner.score(mini.rollout, entropy=True)
            times.append(train.read_clock(CPU))
        return times[-1] - times[0]


class Trl:
    """Rollout batches of TRL's GRPOTrainer. Its training_step generates, scores and computes
    gradients; the other calls are those of the trainer's loop."""

    def __init__(self, settings, task, folder):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
        self.task = task
        self.updates = settings.steps_per_generation
        fixed = dict(output_dir=tempfile.mkdtemp(), report_to="none", save_strategy="no",
                     logging_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
                     router_aux_loss_coef=0.0, gradient_checkpointing=False,
                     model_init_kwargs={"dtype": "float32"})
        if not ends_naturally(task):
            fixed["generation_kwargs"] = {"eos_token_id": NEVER}
        recomputed = replace(settings, old_logp="recompute")     # TRL always recomputes them
        fields, missing = translate(recomputed)
        if missing:
            raise ValueError(missing)
        config = GRPOConfig(**fields | fixed)
        self.trainer = GRPOTrainer(
            folder, self.reward, config,
            Dataset.from_list([{"prompt": p.prompt} for p in task.train]),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"))
        if not ends_naturally(task):
            self.trainer.eos_token_ids = [NEVER]
        self.trainer.create_optimizer_and_scheduler(10 ** 6)
        self.trainer.current_gradient_accumulation_steps = 1

    def reward(self, completions, number, **_):
        return [self.task.verify(text, self.task.train[i])
                for text, i in zip(completions, number)]

    def seconds(self, numbers, step):
        trainer = self.trainer
        rows = [{"prompt": self.task.train[i].prompt, "number": i} for i in numbers
                for _ in range(trainer.num_generations)]
        began = time.perf_counter()
        for _ in range(self.updates):
            trainer.training_step(trainer.model, rows, None)
            trainer.accelerator.clip_grad_norm_(trainer.model.parameters(),
                                                trainer.args.max_grad_norm)
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
            trainer.model.zero_grad()
            trainer.state.global_step += 1
        return time.perf_counter() - began


# ------------------------------------------------------------------------------------------- a case

def ends_naturally(task):
    """Whether responses end where the policy ends them; else all have the largest length."""
    return task.name != FORCED


def forced_task(prompt_tokens, count, length):
    """A task whose rewards alternate, so that every group has right and wrong responses, all of
    this length."""
    if prompt_tokens == "max":
        # four worked lines, the same for all prompts, and a fifth to complete
        rows = make_max_data(tempfile.mkdtemp())[0].read_text(encoding="utf-8").splitlines()
        problems = [Problem(json.loads(row)["prompt"], "") for row in rows]
    else:                                                    # a token per digit
        problems = [Problem("".join(str((i * 7919 + k * k * 31) % 97 % 10)
                                    for k in range(prompt_tokens)), "") for i in range(count * 8)]
    coin = cycle([1.0, 0.0])
    return Task(FORCED, problems, problems[:1], lambda text, problem: next(coin),
                max_completion_length=length)


def prepare(case):
    """-> (settings of train.py, task, checkpoint folder) of a case."""
    flags = ["--device", "cpu", *case.flags.split()]
    folder = case.model or tempfile.mkdtemp()
    if case.model:
        flags += ["--model_name_or_path", folder, "--chat_template", "false",
                  "--learning_rate", "1e-5"]
    task = None
    if case.tokens:
        flags += ["--max_completion_length", str(case.tokens)]
        task = forced_task(case.prompt, parse(flags).prompts_per_step, case.tokens)
    settings = parse(flags)
    task = tasks.prepare_task(settings, task)
    if not case.model:
        for part in load_cold_start(settings, task, CPU):
            part.save_pretrained(folder)
    return settings, task, folder


def run_case(case):
    """The record of a case: both sides measured in turns."""
    limit = measure_limit()
    rollout.end_tokens = find_end_tokens                     # preparing evaluates the warm-up
    settings, task, folder = prepare(case)
    rounds = case.rounds
    if not ends_naturally(task):
        rollout.end_tokens = lambda model, tokenizer: [NEVER]
    sides = {"trl": Trl(settings, task, folder), "ours": Ours(settings, task, folder)}
    stream = PromptStream(len(task.train))
    numbers = [stream.next(settings.prompts_per_step) for _ in range(rounds + 2)]
    peak = {name: peak_bytes(lambda: side.seconds(numbers[-1], 1))
            for name, side in sides.items()}
    seconds = in_turns({name: lambda turn, side=side: side.seconds(numbers[turn], turn + 1)
                        for name, side in sides.items()}, rounds)
    record = {name: {"seconds": spread(seconds[name]), "peak_mb": rounded(peak[name] / MB)}
              for name in sides}
    record["ratio"] = quotients(seconds["trl"], seconds["ours"])
    record["work"] = {
        "rounds": rounds, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    if not ends_naturally(task):
        flop = count_least_flop(settings, task, sides["ours"])
        record["gflop"] = rounded(flop / 1e9)
        record["limit_gflops"] = rounded(limit / 1e9)
        for name in sides:
            seconds = record[name]["seconds"]["median"]
            record[name]["share_of_limit"] = rounded(flop / seconds / limit)
    return record


def count_least_flop(settings, task, ours):
    """Floating-point operations of a rollout batch in which nothing is computed twice."""
    prompts = ours.tokenizer([p.prompt for p in task.train[:settings.prompts_per_step]])
    prompts = prompts["input_ids"]
    passes = 1 + (settings.old_logp == "recompute") + 3      # a backward is two forwards
    return passes * count_forward_flop(
        ours.learner.policy.config, len(prompts), max(map(len, prompts)), settings.num_generations,
        task.max_completion_length, fast.find_prefix(prompts))


def count_forward_flop(config, Q, P, G, T, prefix=0):
    """Floating-point operations of one forward over Q prompts of P tokens and G responses of T
    tokens to each prompt. A prompt is computed once for its G responses, its first `prefix` tokens
    once for all prompts."""
    D = config.hidden_size
    H = config.num_attention_heads
    d = getattr(config, "head_dim", None) or D // H
    weights = 2 * D * H * d + 2 * D * config.num_key_value_heads * d  # q and o, k and v
    weights += 3 * D * config.intermediate_size
    prompt = (prefix + Q * (P - prefix)) * (2 * weights + 4 * H * d * P / 2)
    response = Q * G * (T - 1) * (2 * weights + 4 * H * d * (P + T / 2))
    return config.num_hidden_layers * (prompt + response) + Q * G * T * 2 * D * config.vocab_size


# --------------------------------------------------------------------------------------- the report

def texts(found):
    """The tables of docs/speed.md and the figures of README."""
    records = {name: found["cpu"][name] for name in CASES if name in found["cpu"]}
    rows = []
    limits = []
    for name, r in records.items():
        ratio = r["ratio"]
        share = "–"
        if "gflop" in r:
            share = " / ".join(f"{r[side]['share_of_limit']:.0%}" for side in ("trl", "ours"))
            limits.append(r["limit_gflops"])
        seconds = [f"{r[side]['seconds']['median']:.2f}" for side in ("trl", "ours")]
        rows.append((CASES[name].title, *seconds,
                     f"**{ratio['median']:.2f}** [{ratio['min']:.2f}, {ratio['max']:.2f}]",
                     f"{r['trl']['peak_mb']:.0f} / {r['ours']['peak_mb']:.0f}", share))
    text = {"speed": table(("same work, same process, in turns", "TRL s", "ours s",
                            "TRL ÷ ours [min, max]", "peak MB TRL / ours", "share of the limit"),
                           *rows)}
    if limits:
        text["speed_limit"] = f"{min(limits):.0f} to {max(limits):.0f} GFLOP/s"
    if "default_run" in records:
        text["versus_trl"] = f"{records['default_run']['ratio']['median']:.1f}"
    return text


def main(argv=None):
    parser = command_line(__doc__, "versus_trl.json")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES),
                        help="only these")
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not find_spec("trl"):
        parser.exit(2, "versus_trl.py: TRL is not installed: pip install trl==1.16.0\n")
    found = {"cpu": {}}
    if args.json.is_file():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    for name in args.cases:
        case = CASES[name]
        if case.model and not Path(SMOLLM2).is_dir():
            print(f"{name}: left out: python tests/make_smollm2.py makes its checkpoint")
            continue
        found["cpu"][name] = run_case(case)                  # other cases in the file stay
        print(f"{name}: {json.dumps(found['cpu'][name])}", flush=True)
        write_json(args.json, found | {"texts": texts(found)})


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
