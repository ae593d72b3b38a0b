"""No flag without an effect: every field of Settings, two values, one tiny run each through
train.main, and what must differ between the two. A new flag needs an entry.
python -m pytest tests/run/test_flags.py

Both runs of a flag share all others, and runs are kept, so that the entries share most of their
first runs. What a run shows: metrics, what it printed, its files, the shape of every forward.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks

import models
import train
from plumbing.model import cold_start
from plumbing.run.arguments import flags
from tiny_run import SMALL, TINY, TINY_MODEL, TRAIN, jsonl, read_json

ONE = "--steps 1 --warmup_steps 0"                           # the second mini-batch is off-policy
GRPO = f"{ONE} --algorithm grpo --learning_rate 0.01"        # far off
FLAT = f"{ONE} --lr_scheduler_type constant_with_warmup"
NEW = f"{ONE} --cold_start_steps 1"                          # another tiny MoE, hardly taught
TEACHER = f"{ONE} --algorithm grpo"                          # of itself
DATA = f"{ONE} --model_name_or_path model --dataset_name a.jsonl --verifier exact"
DENSE = DATA.replace("path model", "path dense")
MASK = f"{ONE} --mismatch_mask token"
MOVES = "--steps 2 --warmup_steps 0 --algorithm grpo --learning_rate 0.003"   # two batches apart


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

    def last(self, name):
        return self.metrics[-1][name]

    def state(self):
        """What the last checkpoint holds besides the model."""
        return torch.load(self.checkpoint() / "state.pt", weights_only=True)

    def checkpoint(self):
        return max(self.folder.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))

    def weights(self):
        return (self.checkpoint() / "model.safetensors").read_bytes()

    def trained(self):
        """(rows, width) of the forwards with gradient."""
        return [shape for *shape, gradient in self.forwards if gradient]


def minibatches(name):
    return lambda seen: [u[name] for u in seen.last("minibatches")]


def prompts(seen):
    return [s["prompt"] for s in seen.samples]


# flag: (flags of both runs, one value, another, what must differ: a metric of the last batch, or a
# function of what was seen). None leaves the flag out.
EFFECTS = {
    "algorithm": (ONE, None, "grpo", "clip_low"), "epsilon": (ONE, None, "0.9", "clip_low"),
    "epsilon_high": (ONE, None, "0.9", "clip_high"),
    "reduction": (ONE, None, "sequence-sum", "grad_norm"),
    "objective_constants": (f"{ONE} --algorithm sapo", None, "tau_negative=3", "grad_norm"),
    "advantage": (ONE, None, "leave_one_out", "grad_norm"),
    "teacher_model_name_or_path": (f"{DATA} --algorithm grpo", None, "model --distillation_coef 1",
                                   lambda seen: "teacher_kl" in seen.metrics[-1]),
    "self_distillation": (f"{TEACHER} --distillation_coef 1 --prompts_per_step 8", "answer",
                          "sibling", "teacher_kl"),
    "hint_template": (f"{TEACHER} --distillation_coef 1 --self_distillation answer", None,
                      "{answer}{prompt}", "teacher_kl"),
    "distillation_coef": (f"{TEACHER} --advantage group --self_distillation answer", "1", "0.5",
                          "grad_norm"),
    "teacher_update_rate": (f"{MOVES} --distillation_coef 1 --self_distillation answer", None,
                            "0.05", "teacher_kl"),
    "scale_rewards": (ONE, None, "none", "grad_norm"),
    "dual_clip": (GRPO, None, "1.001", "clip_high"),
    "off_policy_mask": (GRPO, None, "0.001", "clip_low"),
    "entropy_quantile": (ONE, None, "0.8", "grad_norm"),
    "beta": (ONE, None, "0.1", lambda seen: "kl" in seen.metrics[-1]),
    "kl_estimator": (f"{ONE} --beta 0.1", None, "k1", minibatches("grad_norm")),
    "sync_ref_model": (f"{MOVES} --beta 0.1", "false", "true --ref_model_sync_steps 1", "kl"),
    "ref_model_mixup_alpha": (f"{MOVES} --beta 0.1 --sync_ref_model --ref_model_sync_steps 1", None,
                              "1", "kl"),
    "ref_model_sync_steps": (f"{MOVES} --beta 0.1 --sync_ref_model", None, "1", "kl"),
    "entropy_coef": (ONE, None, "0.1", "loss"),
    "positive_example_nll_weight": (f"{ONE} --prompts_per_step 8", None, "0.5", "loss"),
    "dynamic_sampling": (ONE, None, "true", lambda seen: seen.metrics[-1].get("discarded_groups")),
    "overlong_cache": (ONE, None, "0.5", "reward"),
    "mask_truncated_completions": (f"{ONE} --max_completion_length 1", None, "true",
                                   "empty_minibatches"),
    "stage2_dataset_name": (f"{DATA} --stage2_step 1", "b.jsonl", "c.jsonl",
                            lambda seen: seen.state()["stream"]["sizes"]),
    "stage2_step": (NEW, None, "1", lambda seen: seen.state()["stream"]["sizes"]),
    "old_logp": (ONE, None, "sampler", "mismatch_kl"),
    "sampler": (ONE, None, "sampler.py:Greedy", lambda seen: [s["response"] for s in seen.samples]),
    "vllm_gpu_memory_utilization": (f"{ONE} --sampler vllm", None, "0.2",
                                    lambda seen: "'gpu_memory_utilization': 0.2" in seen.out),
    "zero_variance_filter": (f"{ONE} --reduction token-mean", None, "true", "grad_norm"),
    "use_kl_in_reward": (f"{ONE} --beta 0.1", None, "true",
                         lambda seen: "kl_loss" in seen.metrics[-1]),
    "lam": (f"{ONE} --algorithm ppo", None, "0.5", "grad_norm"),
    "critic_warmup": (f"{ONE} --algorithm ppo --steps 2", None, "1", "grad_norm"),
    "top_p": (ONE, None, "0.5", "entropy"), "top_k": (ONE, None, "2", "entropy"),
    "sampler_dtype": (ONE, None, "int4", lambda seen: seen.last("mismatch_kl") > 1e-6),
    "mismatch": (ONE, None, "token_truncate --mismatch_high 0.5", "grad_norm"),
    "mismatch_high": (f"{ONE} --mismatch seq_truncate", None, "0.5", "grad_norm"),
    "mismatch_mask": (ONE, None, "token --mismatch_mask_bounds 2 5", "grad_norm"),
    "mismatch_mask_bounds": (MASK, None, "2 5", "grad_norm"),
    "routing_replay": (f"{ONE} --sampler_dtype int3", "old", "rollout", "mismatch_kl"),
    "router_aux_loss_coef": (ONE, None, "0.1", "loss"),

    "model_name_or_path": (FLAT, None, "model", "lr"),
    "hidden_size": (NEW, None, "16", lambda seen: len(seen.weights())),
    "num_hidden_layers": (NEW, None, "2", lambda seen: len(seen.last("flip_rate_per_layer"))),
    "num_experts": (NEW, None, "2", lambda seen: len(seen.weights())),
    "num_experts_per_tok": (NEW, None, "1", "entropy"),
    "cold_start_steps": (NEW, "1", "2", "entropy"),
    "cold_start_learning_rate": (NEW, None, "0.01", "entropy"),

    "use_peft": (ONE, None, "true", "grad_norm"),
    "lora_r": (f"{ONE} --use_peft", None, "2", "grad_norm"),
    "lora_alpha": (f"{ONE} --use_peft", None, "8", "grad_norm"),
    "lora_target_modules": (f"{ONE} --use_peft", None, "q_proj", "grad_norm"),
    "load_in_4bit": (f"{DENSE} --use_peft", None, "true", "perplexity_old"),

    "dataset_name": (DATA, "a.jsonl", "b.jsonl", prompts),
    "test_dataset_name": (f"{DATA} --eval_samples 1", "b.jsonl", "c.jsonl",
                          lambda seen: seen.forwards),
    "columns": (DATA, None, "other other_answer", prompts),
    "verifier": (DATA, "exact", "mine.py:reward", "reward"),
    "verifier_timeout": (f"{DATA} --verifier mine.py:slow", None, "0.01", lambda seen: seen.code),
    "reward_weights": (f"{DATA} mine.py:reward", None, "1 0.5", "reward"),
    "chat_template": (DATA, None, "false", lambda seen: {width for _, width, _ in seen.forwards}),
    "tool": (DATA, None, "mine.py:tool --tool_stop ,", lambda seen: seen.samples),
    "tool_stop": (f"{DATA} --tool mine.py:tool", ",", "=", lambda seen: seen.samples),
    "system_prompt": (DATA, None, "3", lambda seen: {width for _, width, _ in seen.forwards}),
    "prompt_template": (DATA, None, "1+1=2,{prompt}",
                        lambda seen: {width for _, width, _ in seen.forwards}),
    "stop": (DATA, None, ",", "length"), "min_terms": (NEW, None, "2", prompts),
    "max_terms": (NEW, None, "3", prompts), "verbose_answers": (NEW, None, "true", "length"),

    "steps": (ONE, "1", "2", lambda seen: len(seen.metrics)),
    "prompts_per_step": (ONE, None, "8", lambda seen: seen.trained()),
    "num_generations": (ONE, None, "8", lambda seen: seen.trained()),
    "steps_per_generation": (ONE, None, "1", lambda seen: len(seen.last("minibatches"))),
    "num_iterations": (ONE, None, "2", lambda seen: len(seen.last("minibatches"))),
    "max_prompt_length": (DATA, None, "3", lambda seen: seen.out),
    "max_completion_length": (ONE, None, "2", "truncated"),
    "temperature": (ONE, None, "2", "entropy"),

    "learning_rate": (FLAT, None, "0.001", "lr"),
    "lr_scheduler_type": (ONE, None, "constant_with_warmup", "lr"),
    "warmup_steps": ("--steps 1", "0", "10", "lr"), "weight_decay": (FLAT, None, "1", Seen.weights),
    "max_grad_norm": (ONE, None, "0.001", Seen.weights),

    "micro_batch_size": (ONE, None, "2", lambda seen: len(seen.trained())),
    "gradient_checkpointing": (ONE, None, "true", lambda seen: seen.kept),
    "plain": (ONE, None, "true", lambda seen: seen.trained()),
    "fp16": (ONE, None, "true", "perplexity_old"),
    "device": (ONE, "cpu", "auto", lambda seen: seen.out),  # a GPU that is taken
    "bf16": (ONE, None, "true", "perplexity_old"),
    "optim": (FLAT, None, "adamw_8bit", Seen.weights),

    "config": (ONE, None, "settings.yaml", "grad_norm"),
    "dry_run": (ONE, None, "true", lambda seen: seen.files),
    "output_dir": (ONE, None, "elsewhere", lambda seen: seen.folder.name),
    "overwrite_output_dir": (f"{ONE} --output_dir used", None, "true", lambda seen: seen.code),
    "resume": (f"{ONE} --output_dir used", None, "true", lambda seen: seen.code),
    "trust_run_code": (ONE, None, "true", lambda seen: seen.code),
    "save_steps": ("--steps 2 --warmup_steps 0", None, "1",
                   lambda seen: len([f for f in seen.files if f.endswith("state.pt")])),
    "save_tokens": (ONE, None, "false", lambda seen: seen.files),
    "eval_steps": ("--steps 2 --warmup_steps 0 --eval_samples 1 --eval_prompts 2", None, "1",
                   lambda seen: "pass_at_1" in seen.metrics[0]),
    "eval_prompts": (f"{ONE} --eval_samples 1", "2", "3", lambda seen: seen.forwards[0]),
    "eval_samples": (ONE, None, "1 --eval_prompts 2", lambda seen: len(seen.forwards)),
    "seed": (DATA, None, "1", prompts),
    "report_to": (ONE, None, "tensorboard", lambda seen: any("tfevents" in f for f in seen.files)),
}


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
    time.sleep(0.03)
    return 1.0

def tool(text):
    return "11"
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
        (model / name).write_text(json.dumps(content | changes))
        return content
    edit("tokenizer_config.json", chat_template="{{ messages[0].content }}+")
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
    models.saved(home / "dense", "qwen2", vocab_size=32, num_hidden_layers=1,
                 initializer_range=0.02)
    for name, text in FILES.items():
        (home / name).write_text(text)
    return home


@pytest.fixture(scope="module")
def run(home):
    """run(flags) -> Seen, once for every line of flags."""
    seen, handlers = {}, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def once(flags):
        if flags not in seen:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(home)
                patch.setattr(cold_start, "MUST_PASS", 0.0)
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
    if "--device" in flags:                                  # a machine whose GPU is taken
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
    if "vllm" in flags:                                      # the real one needs an environment
        patch.syspath_prepend(str(Path(__file__).parents[1] / "engines" / "fake"))

    def look(module, args):
        if isinstance(module, torch.nn.Embedding):
            forwards.append((*args[0].shape, torch.is_grad_enabled()))

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor
    folder = flags[flags.index("--output_dir") + 1] if "--output_dir" in flags else name
    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
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


def test_every_flag_has_an_entry():
    assert {f.name for f in flags()} == {*EFFECTS, "shard"}


@pytest.mark.parametrize("flag", EFFECTS)
def test_a_flag_has_an_effect(flag, run):
    both, one, other, what = EFFECTS[flag]
    optional = {"peft": "peft", "tensorboard": "tensorboard", "4bit": "bitsandbytes",
                "adamw_8bit": "bitsandbytes"}              # CI has them
    for word, package in optional.items():
        if word in f"{both} {flag} {one} {other}":
            pytest.importorskip(package)
    observe = what if callable(what) else lambda seen: seen.last(what)
    seen = [observe(run(both if value is None else f"{both} --{flag} {value}"))
            for value in (one, other)]
    assert seen[0] != seen[1], f"--{flag} {one} and {other}: {seen[0]} both times"


@pytest.mark.slow
def test_shard_has_an_effect(home):
    """With two processes: what trains is another kind of module."""
    script = home / "kind.py"
    script.write_text(textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(TRAIN).parent)!r})
        import train
        from plumbing.parallel import processes
        wrap = processes.wrap
        def telling(*args):
            scorer = wrap(*args)
            # one write: print would make several, which those of the other process can part
            sys.stdout.write(f"kind {{type(scorer).__name__}}\\n")
            return scorer
        processes.wrap = telling
        train.main()
    """))
    kinds = []
    for more in ([], ["--shard"]):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
             str(script), *TINY, *ONE.split(), *more], cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kinds.append({line for line in done.stdout.splitlines() if line.startswith("kind ")})
    assert kinds == [{"kind DistributedDataParallel"}, {"kind FSDPActor"}]
