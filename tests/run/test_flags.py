"""No flag without an effect: every field of Settings, two values, one tiny run each through
train.main, and what must differ between the two.
python -m pytest tests/run/test_flags.py

Both runs of a flag share all others, and runs are kept, so that the entries share most of their
first runs. What a run shows: metrics, what it printed, its files, the shape of every forward.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks

import train
from session.arguments import Settings
from tiny_run import SMALL, TINY, TINY_MODEL, jsonl, read_json, write

ONE = "--steps 1 --warmup_steps 0"                           # the second mini-batch is off-policy
ROWS = f"{ONE} --model_name_or_path model --dataset_name a.jsonl"
DATA = f"{ROWS} --verifier exact"
STARTS = {
    "ONE": ONE, "ROWS": ROWS, "DATA": DATA, "TWO": "--steps 2 --warmup_steps 0",
    "GRPO": f"{ONE} --algorithm grpo --learning_rate 0.01",  # far off
    "FLAT": f"{ONE} --lr_scheduler_type constant_with_warmup",
    "NEW": f"{ONE} --cold_start_steps 1",                    # another tiny MoE, hardly taught
    "MASK": f"{ONE} --algorithm grpo --mismatch_mask token"}


@dataclass
class Seen:
    """What can be observed of a run."""
    code: int                # exit code
    out: str                 # printed, errors included
    metrics: list            # of dicts, a line of metrics.jsonl each
    samples: list            # of dicts: prompt, response, reward
    files: set               # paths below the run's folder
    forwards: list           # (rows, width, with gradient) of every forward of the policy
    kept: int                # bytes that its forwards keep for their backwards
    folder: Path


def checkpoint(seen):
    assert not seen.code, seen.out                           # a flag that was refused
    return max(seen.folder.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))


def weights(seen):
    return hashlib.sha256((checkpoint(seen) / "model.safetensors").read_bytes()).hexdigest()


LOOKS = {                                                    # beside the attributes of Seen
    "batches": lambda seen: len(seen.metrics),
    "evaluated": lambda seen: "pass_at_1" in seen.metrics[0],
    "first_forward": lambda seen: seen.forwards[2],          # after those that check moe.py
    "grad_norms": lambda seen: [u["grad_norm"] for u in seen.metrics[-1]["minibatches"]],
    "layers": lambda seen: len(seen.metrics[-1]["flip_rate_per_layer"]),
    "mismatch": lambda seen: seen.metrics[-1]["mismatch_kl"] > 1e-6,
    "prompts": lambda seen: [s["prompt"] for s in seen.samples],
    "size": lambda seen: (checkpoint(seen) / "model.safetensors").stat().st_size,
    "tfevents": lambda seen: any("tfevents" in file for file in seen.files),
    "trained": lambda seen: [shape for *shape, gradient in seen.forwards if gradient],
    "updates": lambda seen: len(seen.metrics[-1]["minibatches"]),
    "vllm_share": lambda seen: "'gpu_memory_utilization': 0.2" in seen.out,
    "weights": weights,
    "widths": lambda seen: {width for _, width, _ in seen.forwards}}


def look(seen, what):
    if what in LOOKS:
        return LOOKS[what](seen)
    return getattr(seen, what) if hasattr(seen, what) else seen.metrics[-1].get(what)


# A flag | its value, beside a run without it, or two of them | what must differ: a metric of the
# last batch, or a look | the flags of both runs, which begin as one of STARTS: ONE, if nothing is
# said.
EFFECTS = """
algorithm              | grpo | clip_low
epsilon                | 0.9 | clip_low
epsilon_high           | 0.9 | clip_high
constants              | tau_positive=3 | grad_norm | ONE --algorithm sapo
reduction              | sequence-sum | grad_norm
advantage              | leave_one_out | grad_norm
scale_rewards          | none | grad_norm
dual_clip              | 1.001 | clip_high | GRPO
off_policy_mask        | 0.001 | clip_low | GRPO
entropy_quantile       | 0.8 | grad_norm | GRPO
beta                   | 0.1 | kl
kl_estimator           | k1 | grad_norms | ONE --beta 0.1
entropy_coef           | 0.1 | loss
dynamic_sampling       | true | discarded_groups
overlong_cache         | 0.5 | reward
mask_truncated_completions | true | grad_norm | ONE --max_completion_length 4
stage2_dataset_name    | b.jsonl or c.jsonl | prompts | DATA --stage2_step 1
stage2_step            | 1 | prompts | NEW
old_logp               | sampler | mismatch_kl
sampler                | sampler.py:Greedy | samples
vllm_gpu_memory_utilization | 0.2 | vllm_share | ONE --sampler vllm
use_kl_in_reward       | true | kl_loss | ONE --beta 0.1
lam                    | 0.5 | grad_norm | ONE --algorithm ppo
sampler_dtype          | int4 | mismatch
mismatch               | token_truncate --mismatch_high 0.5 | grad_norm
mismatch_high          | 0.5 | grad_norm | ONE --mismatch seq_truncate
mismatch_mask          | token --mismatch_mask_bounds 2 5 | grad_norm | GRPO
mismatch_mask_bounds   | 2 5 | grad_norm | MASK
routing_replay         | old or rollout | mismatch_kl | ONE --sampler_dtype int3
router_aux_loss_coef   | 0.1 | loss
model_name_or_path     | model | lr | FLAT
hidden_size            | 16 | size | NEW
num_hidden_layers      | 2 | layers | NEW
num_experts            | 2 | size | NEW
num_experts_per_tok    | 1 | entropy | NEW
cold_start_steps       | 1 or 2 | entropy | NEW
cold_start_learning_rate | 0.01 | entropy | NEW
use_peft               | true | grad_norm
lora_r                 | 2 | grad_norm | ONE --use_peft
lora_alpha             | 8 | grad_norm | ONE --use_peft
lora_target_modules    | q_proj | grad_norm | ONE --use_peft
dataset_name           | a.jsonl or b.jsonl | prompts | DATA
test_dataset_name      | b.jsonl or c.jsonl | forwards | DATA --eval_samples 1
columns                | other other_answer | prompts | DATA
verifier               | exact or mine.py:reward | reward | ROWS
verifier_timeout       | 0.01 | verifier_errors | DATA --verifier mine.py:slow
reward_weights         | 1 0.5 | reward | DATA mine.py:reward
chat_template          | false | widths | DATA
chat_template_kwargs   | {"more":7} | widths | DATA
environment            | mine.py:Play | samples | DATA --stop ,
max_turns              | 1 | samples | DATA --stop , --environment mine.py:Play
system_prompt          | 3 | widths | DATA
prompt_template        | 1+1=2,{prompt} | widths | DATA
stop                   | , | length | DATA
min_terms              | 2 | prompts | NEW
max_terms              | 3 | prompts | NEW
verbose_answers        | true | length | NEW
steps                  | 1 or 2 | batches
prompts_per_step       | 8 | trained
num_generations        | 8 | trained
steps_per_generation   | 1 | updates
num_iterations         | 2 | updates
max_prompt_length      | 3 | out | DATA
max_completion_length  | 2 | truncated
temperature            | 2 | entropy
learning_rate          | 0.001 | lr | FLAT
lr_scheduler_type      | constant_with_warmup | lr
warmup_steps           | 0 or 10 | lr | --steps 1
weight_decay           | 1 | weights | FLAT
max_grad_norm          | 0.001 | weights
micro_batch_size       | 2 | trained
gradient_checkpointing | true | kept
plain                  | true | trained
fp16                   | true | perplexity_old
device                 | cpu or mps  | out
bf16                   | true | perplexity_old
optim                  | adamw_8bit | weights | FLAT
config                 | settings.yaml | grad_norm
dry_run                | true | files
output_dir             | elsewhere | folder
resume                 | true | code | ONE --output_dir used
save_steps             | 1 | files | TWO
save_tokens            | false | files
save_minibatches       | true | files
eval_steps             | 1 | evaluated | TWO --eval_samples 1 --eval_prompts 2
eval_prompts           | 2 or 3 | first_forward | ONE --eval_samples 1
eval_samples           | 1 --eval_prompts 2 | forwards
seed                   | 1 | prompts | DATA
report_to              | tensorboard | tfevents
"""


def entry(line):
    """A line of EFFECTS: (flag, (flags of both runs, one value or None, another, what differs))."""
    flag, values, what, both = [*(part.strip() for part in line.split(" | ")), "ONE"][:4]
    start, _, more = both.partition(" ")
    one, _, other = values.rpartition(" or ")
    return flag, (f"{STARTS.get(start, start)} {more}".strip(), one or None, other, what)


EFFECTS = dict(map(entry, EFFECTS.strip().splitlines()))


FILES = {
    "settings.yaml": "scale_rewards: none\n",
    "sampler.py": """
from rollout import Sampler

class Greedy(Sampler):
    def sample(self, *inputs, **options):
        return super().sample(*inputs, **options | {"temperature": 0})
""",
    "mine.py": """
import time

def reward(response, answer):
    return 1.0

def some(response, answer):
    return float(answer < "4")

def slow(response, answer):
    time.sleep(0.03 * (response != answer))
    return 1.0

class Play:
    template = False
    def __init__(self, row):
        pass
    def step(self, text):
        return "11", 0.5, False
"""}


@pytest.fixture(scope="module")
def home(cold_start, tmp_path_factory):
    """A folder with the cold start, a model of the built-in task and data files for it."""
    home = tmp_path_factory.mktemp("flags")
    model = home / "model"
    shutil.copytree(cold_start.parent, home / "runs/cold_start")
    shutil.copytree(cold_start, model)

    def edit(name, **changes):
        content = read_json(model / name)
        write(model / name, json.dumps(content | changes))
        return content
    edit("tokenizer_config.json", chat_template="{{ messages[0].content }}+{{ more }}")
    letters = edit("tokenizer.json")["model"]                # those that StopStringCriteria needs
    letters["vocab"] |= {letter: 17 + i for i, letter in enumerate("abcdef")}
    edit("tokenizer.json", model=letters)
    edit("config.json", vocab_size=23)
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, 6))
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    for name, terms in (("a", range(1, 10)), ("b", range(3, 9)), ("c", range(2, 5))):
        jsonl(home / f"{name}.jsonl",
              [{"prompt": f"{i}+{j}=", "answer": f"{i},{(i + j) % 10}.", "other": f"{j}+{i}+1=",
                "other_answer": "0"} for i in terms for j in terms])
    for name, text in FILES.items():
        write(home / name, text)
    return home


@pytest.fixture(scope="module")
def run(home):
    """run(flags) -> Seen, once for every line of flags."""
    seen, handlers = {}, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def once(flags):
        if flags not in seen:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(home)
                seen[flags] = observed(patch, flags.split(), f"run{len(seen)}")
        return seen[flags]
    yield once
    for number, handler in handlers.items():
        signal.signal(number, handler)


def tiny_for(flags):
    if "--dataset_name" in flags:
        return SMALL
    return TINY_MODEL if "--model_name_or_path" in flags else TINY


def observed(patch, flags, name):
    """One run of train.main, watched."""
    forwards, kept, out, code = [], [], io.StringIO(), 0
    if "used" in flags:                                      # a folder with a run
        shutil.rmtree("used", ignore_errors=True)
        observed(patch, [*ONE.split(), "--output_dir", "USED"], "used")
        os.rename("USED", "used")
    if "vllm" in flags:                                      # the real one needs an environment
        patch.syspath_prepend(str(Path(__file__).parents[1] / "features/fake"))

    def watch(module, args):
        if isinstance(module, torch.nn.Embedding):
            forwards.append((*args[0].shape, torch.is_grad_enabled()))

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor
    folder = flags[flags.index("--output_dir") + 1] if "--output_dir" in flags else name
    hook = torch.nn.modules.module.register_module_forward_pre_hook(watch)
    try:
        with redirect_stdout(out), redirect_stderr(out), saved_tensors_hooks(keep, lambda x: x):
            train.main([*tiny_for(flags), "--output_dir", folder, *flags])
    except SystemExit as stop:
        code = stop.code
    finally:
        hook.remove()
        sys.modules.pop("vllm", None)
    folder = Path.cwd() / folder
    read = lambda file: read_json(folder / file)
    there = (folder / "metrics.jsonl").exists()
    return Seen(code, out.getvalue(), read("metrics.jsonl") if there else [],
                [s for row in read("samples.jsonl") for s in row["samples"]] if there else [],
                {str(p.relative_to(folder)) for p in folder.rglob("*")}, forwards, sum(kept),
                folder)


# --shard needs two processes: tests/parallel/test_distributed.py. --cuda_graphs and --tf32 need a
# GPU: tests/speed. --trust_run_code: test_faults.py.
ELSEWHERE = {"shard", "cuda_graphs", "tf32", "trust_run_code"}


def usual_entry(f):
    """For a flag without one: its last choice, the other bool or twice the number changes the
    weights. Where that shows nothing, EFFECTS needs an entry."""
    other = not f.default if isinstance(f.default, bool) else 2 * f.default or 1
    return ONE, None, f.metadata.get("choices", [other])[-1], "weights"


@pytest.mark.parametrize("f", [f for f in fields(Settings) if f.name not in ELSEWHERE],
                         ids=lambda f: f.name)
def test_a_flag_has_an_effect(f, run):
    flag = f.name
    both, one, other, what = EFFECTS.get(flag) or usual_entry(f)
    optional = {"peft": "peft", "tensorboard": "tensorboard", "adamw_8bit": "bitsandbytes"}
    for word, package in optional.items():
        if word in f"{both} {flag} {one} {other}":
            pytest.importorskip(package)
    seen = [look(run(both if value is None else f"{both} --{flag} {value}"), what)
            for value in (one, other)]
    assert seen[0] != seen[1], f"--{flag} {one} and {other}: {seen[0]} both times"
