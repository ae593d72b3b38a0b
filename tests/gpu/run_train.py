"""train.main on a pretended GPU, one list of flags after the other; a JSON line for each.

    python tests/gpu/run_train.py '["--algorithm gspo", "hf --beta 0.1", "resume --bf16 true"]'

First words: `hf` trains a random Qwen2 checkpoint (`mixtral`: a random Mixtral) on prompts of
unequal length that begin alike, not the tiny MoE; `resume` takes the last checkpoint away, resumes
and wants the same weights. The run folder is the current one.

Says {"flags", "exit" (None: it ran to its end), "error", "syncs" and "launches" per phase, "where"
the host waits}. Phases: a rollout without its token steps and looks for ended rows, these, the
cutting of a batch, optimizer steps.
"""

import contextlib
import io
import json
import random
import shutil
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402
from transformers import (MixtralConfig, MixtralForCausalLM, Qwen2Config,  # noqa: E402
                          Qwen2ForCausalLM)

import train  # noqa: E402
from plumbing.data import running_sum
from plumbing.model import cold_start
from plumbing.speed import fast  # noqa: E402
from tiny_run import TINY  # noqa: E402

cold_start.MUST_PASS, gpu.project = 0.0, str(HERE.parents[1])
FLAGS = [*TINY, "--device", "auto"]
HF_FLAGS = ("--model_name_or_path {0} --dataset_name {0}/data.jsonl --verifier exact "
            "--no_chat_template --max_completion_length 12 --prompts_per_step 4 "
            "--num_generations 4 --steps_per_generation 2 --eval_samples 0")
SHAPE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=64, bos_token_id=None)


def checkpoint(kind):
    """Flags for a random checkpoint and its data, made in folder `kind`."""
    folder, tokenizer = Path(kind), running_sum.builtin_tokenizer()
    if not folder.exists():
        torch.manual_seed(0)
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        more = dict(num_local_experts=4, num_experts_per_tok=2)
        model = (Qwen2ForCausalLM(Qwen2Config(**SHAPE, **ends)) if kind == "hf"
                 else MixtralForCausalLM(MixtralConfig(**SHAPE, **ends, **more)))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        rng = random.Random(0)
        terms = [[rng.choice("123456789") for _ in range(rng.randint(1, 6))] for _ in range(60)]
        rows = [{"prompt": "1+2+3+4+5+6+7+8+" + "+".join(t) + "=",
                 "answer": str(sum(map(int, t)) % 10)} for t in terms]
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return HF_FLAGS.format(kind).split()


def phase(owner, name, label):
    """Counts what happens inside owner.name as a phase."""
    inside = getattr(owner, name)

    def counted(*args, **kwargs):
        with gpu.phase(label):
            return inside(*args, **kwargs)
    setattr(owner, name, counted)


def same_after_resume(flags):
    """Runs without its last step once more -> whether its weights came out the same, to the bit."""
    folder = Path(flags[flags.index("--output_dir") + 1]) / "checkpoints"
    last = max(folder.glob("step_*"), key=lambda f: int(f.name.split("_")[1]))
    before = {f.name: f.read_bytes() for f in last.glob("*.safetensors")}
    shutil.rmtree(last)
    train.main([*flags, "--resume"])
    return before == {f.name: f.read_bytes() for f in last.glob("*.safetensors")}


def run(case):
    gpu.reset()
    error, code, out = None, None, io.StringIO()
    words = case.split()
    resume = "resume" in words[:2]
    kind = next((word for word in words[:2] if word in ("hf", "mixtral")), None)
    flags = [*(checkpoint(kind) if kind else FLAGS), *words[bool(kind) + resume:]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            train.main([*flags, *["--save_steps", "1"] * resume])
            if resume and not same_after_resume([*flags, "--save_steps", "1"]):
                error = "other weights after --resume"
    except SystemExit as stop:
        code, error = stop.code, out.getvalue().strip().splitlines()[-1]
    except Exception as failure:
        code, error = 1, f"{failure} {traceback.format_exc().splitlines()[-3:]}"
    found = {"flags": case, "exit": code, "error": error}
    for what in ("syncs", "launches"):
        found[what] = {name: round(gpu.count[name][what] / max(1, gpu.calls[name]), 3)
                       for name in PHASES}
    return found | {"where": {name: gpu.sites[name].most_common(12) for name in PHASES}}


PHASES = {"rollout": (fast, "sample"), "token step": (fast.Rows, "step"),
          "look": (fast.Rows, "drop"), "cut": (train.Batch, "groups"),
          "update": (train, "update")}

if __name__ == "__main__":
    for label, (owner, name) in PHASES.items():
        phase(owner, name, label)
    torch.set_num_threads(1)
    with gpu:
        for case in json.loads(sys.argv[1]):
            print(json.dumps(run(case)), flush=True)
