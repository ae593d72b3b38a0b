"""Memory: of log-prob and update passes against the size of the vocabulary; and the estimate of
plumbing/run/memory.py against peaks measured on a CPU and counted on a simulated GPU.

    python benchmarks/memory.py            # --quick: only the shortest response and one model
                                           # --script: only the updates of train.py
                                           # TRL's column needs pip install trl==1.16.0

Measured peaks come from the CPU allocator, because torch's profiler records every allocation: a
peak is the memory that the pass added. The first table uses a backbone of width 64 with Qwen's
vocabulary of 151,936 tokens, so that nearly all memory is for logits. `ours`: the LM head in chunks
of rows, which the backward pass recomputes. `at once`: the same code with all logits in one tensor.
Simulated peaks come from tests/gpu/simulate_memory.py, which needs no GPU but g++. --script
measures the updates inside `train.main`, from a checkpoint of random weights, with and without
--gradient_checkpointing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's own log
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from plumbing.speed.fast import response_logp  # noqa: E402
from plumbing.run.memory import GB, Work, fits, footprint, parameters_of  # noqa: E402
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from rollout import Rollout  # noqa: E402
import rollout as plain  # noqa: E402
import train  # noqa: E402

MB = 2 ** 20


def peak_bytes(work, device=torch.device("cpu")):
    """How many bytes work() allocates at most, beyond what is allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def random_model(kind, D, L, H, H_kv, ffn, V, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=H_kv,
        head_dim=D // H, intermediate_size=ffn, vocab_size=V, tie_word_embeddings=False, **more))


def random_rollout(V, prompts, group, P, T):
    generator = torch.Generator().manual_seed(0)
    ids = lambda *shape: torch.randint(0, V, shape, generator=generator)
    B = prompts * group
    seen = torch.ones(prompts, P, dtype=torch.bool)
    mask = torch.ones(B, T, dtype=torch.bool)
    return Rollout(ids(prompts, P), seen, ids(B, T), mask, torch.zeros(B, T),
                   torch.zeros(B, dtype=torch.bool), [""] * B, group)


# ------------------------------------------------------------------------ against the vocabulary

def passes(logp_of, model):
    """Peak MB of a log-prob pass without gradient, and of a forward with its backward pass."""
    def update():
        logp_of(model).sum().backward()

    with torch.no_grad():
        logp = peak_bytes(lambda: logp_of(model)) / MB
    update = peak_bytes(update) / MB
    model.zero_grad()
    return round(logp), round(update)


def vocabulary(lengths, V=151936):
    """Peak MB as {T: {side: (log-prob pass, update)}}. A side that would not fit in memory is left
    out."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        add_fused_lm_head = None
    found = {}
    for T in lengths:
        rollout = random_rollout(V, 1, 1, 16, T)
        ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)
        labels = ids.clone()
        labels[:, :16] = -100
        sides = {"ours": lambda m: response_logp(m, rollout, entropy=False).logp}
        if 4 * T * V * 4 < free_bytes() / 2:
            sides["at once"] = lambda m: response_logp(m, rollout, entropy=False,
                                                       max_logits=2 ** 62).logp
        if add_fused_lm_head:
            sides["trl"] = lambda m: m(input_ids=ids, attention_mask=torch.ones_like(ids),
                                       labels=labels, fused_lm_head=True).log_probs
        found[T] = {}
        for name, logp_of in sides.items():
            model = random_model("qwen2", 64, 1, 4, 4, 128, V)
            if name == "trl":                                # as GRPOTrainer sets it up
                add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
            found[T][name] = passes(logp_of, model)
    return found


def free_bytes():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------- the estimate and the measure

SHAPE = ("qwen2", 128, 6, 4, 2, 512, 512)
CHECKS = {   # (model, work): small enough for a CPU, dominated by different things
    "dense, vocabulary": (("llama", 64, 2, 4, 4, 128, 49152), Work(1, 4, 16, 128, 4)),
    "dense, weights": (("llama", 512, 4, 8, 8, 2048, 2048), Work(1, 4, 16, 16, 4)),
    "dense, plain path": (SHAPE, Work(2, 8, 32, 96, 16, plain=True, padded=False)),
    "dense, checkpointing": (SHAPE, Work(2, 8, 32, 96, 16, gradient_checkpointing=True,
                                         padded=False)),
    "MoE, 8 experts top-2": (("qwen3_moe", 96, 4, 4, 4, 192, 64), Work(4, 8, 24, 48, 32)),
}


def measured(shape, work):
    """Peak bytes of an update, as (measured, estimated), with weights and AdamW's state."""
    more = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=shape[1],
                decoder_sparse_step=1, norm_topk_prob=True) if shape[0] == "qwen3_moe" else {}
    model = random_model(*shape, **more).train()
    if work.gradient_checkpointing:
        model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rollout = random_rollout(shape[-1], work.rows // work.group_size, work.group_size,
                             work.prompt_tokens, work.new_tokens)
    way = plain.response_logp if work.plain else response_logp

    def update():
        way(model, rollout, entropy=False).logp.sum().backward()
        optimizer.step()

    update()                                     # AdamW's moments exist from the first step on
    optimizer.zero_grad()
    parameters = sum(p.numel() for p in model.parameters())
    estimate = footprint(model.config, parameters, work)
    return 12 * parameters + peak_bytes(update), estimate["state"] + estimate["updating"]


# --------------------------------------------------------------------- the updates of the script

SCRIPT = ("llama", 128, 12, 4, 4, 512, 4096)   # the tokenizer has 17: answers rarely end early
ONE_GROUP = ("--steps 2 --prompts_per_step 2 --num_generations 8 --steps_per_generation 2 "
             "--max_completion_length 128 --verifier exact --eval_samples 0 --device cpu").split()


def through_the_script(shape=SCRIPT, flags=ONE_GROUP):
    """The memory of an update of train.main, with and without --gradient_checkpointing:
    {"tokens", "layers", "width", "ways": {flag: (peak in MB, CPU seconds)}}.

    Of four updates the first creates AdamW's moments, the next two are timed and the last is
    measured."""
    found = {}
    update = train.update
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        tokenizer = builtin_tokenizer()
        ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
        random_model(*shape, **ends).save_pretrained("model")
        tokenizer.save_pretrained("model")
        rows = [{"prompt": f"{i}+{j}=", "answer": "0"} for i in range(10) for j in range(10)]
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for flag in ("", "--gradient_checkpointing"):
            seen = []

            def watched(args, learner, mini):
                stats = []
                began = time.process_time()

                def once():
                    stats.append(update(args, learner, mini))
                peak = peak_bytes(once) if len(seen) == 3 else once()
                seen.append((peak, time.process_time() - began, int(mini.rollout.mask.sum())))
                return stats[0]
            with patch.object(train, "update", watched), redirect_stdout(sys.stderr):
                train.main(["--model_name_or_path", "model", "--dataset_name", "rows.jsonl",
                            "--output_dir", f"run{flag}", *flags, *flag.split()])
            found[flag] = round(seen[3][0] / MB), round(min(s for _, s, _ in seen[1:3]), 2)
    return {"tokens": seen[3][2], "layers": shape[2], "width": shape[1], "ways": found}


# ---------------------------------------------------------------------- a GPU that is not there

# name: (model type, hidden, layers, heads, key-value heads, feed-forward, vocabulary)
MODELS = {"SmolLM2 135M": ("llama", 576, 30, 9, 3, 1536, 49152),
          "Qwen 0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
          "Qwen3 0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936),
          "Qwen 1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
          "Qwen 3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936)}
WAYS = {"full": {}, "checkpointing": {"gradient_checkpointing": True}, "LoRA": {"state": "lora"},
        "offload": {"state": "offload"}}
DEEPER = [("SmolLM2 135M", "full", 30), ("Qwen 0.5B", "full", 24), ("Qwen3 0.6B", "full", 28),
          ("Qwen 1.5B", "full", 28), ("Qwen 3B", "full", 36), ("Qwen 3B", "LoRA", 36),
          ("Qwen 3B", "checkpointing", 36), ("Qwen3 0.6B", "checkpointing", 28)]  # all layers


def named(name):
    """The transformers config of a row of MODELS."""
    kind, D, L, H, H_kv, F, V = MODELS[name]
    return AutoConfig.for_model(
        kind, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=H_kv,
        head_dim=128 if kind == "qwen3" else D // H, intermediate_size=F, vocab_size=V,
        tie_word_embeddings=True, max_position_embeddings=4096)


def simulated(cases):
    """Run simulate_memory.py on these cases -> [{"model", ..., "peak", "estimate"}], in bytes."""
    script = ROOT / "tests" / "gpu" / "simulate_memory.py"
    done = subprocess.run([sys.executable, script, json.dumps(cases)], capture_output=True,
                          text=True)
    if done.returncode:
        raise RuntimeError(f"{script.name}: {done.stderr.strip().splitlines()[-1]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def simulated_cases(models):
    """The cases to simulate: every model with full fine-tuning and the first two in every way, with
    two layers, which is quick. With more than one model also those of DEEPER, with all layers, on
    which the formula was not fitted."""
    few = [{"model": m, "way": way, "rows": 8, "layers": 2, "max_logits": 2**26, **more}
            for i, m in enumerate(models) for way, more in WAYS.items() if way == "full" or i < 2]
    deep = [{"model": m, "way": way, "rows": 8, "layers": layers, "max_logits": 2**26, **WAYS[way]}
            for m, way, layers in DEEPER if len(models) > 1]
    return few + deep


def fits_table(error):
    """The table of docs/speed.md of what fits on which GPU, as lines of text. error: the largest
    relative error of the estimate against the simulated peaks."""
    sizes = (8, 16, 24, 80)
    lines = ["rows per micro-batch that fit: 8 queries x 8 responses, 512 + 512 tokens, bfloat16",
             "(GC: only with --gradient_checkpointing; -: not even one row). Computed, no GPU was",
             f"there; simulated peaks of these models differ by at most {error:.0%}.", "",
             f"{'':14}{'':26}{'state':>9}" + "".join(f"{f'{gb} GB':>8}" for gb in sizes)]
    for name in MODELS:
        config = named(name)
        parameters = parameters_of(config)
        for way, state in (("full fine-tuning", "full"), ("--use_peft", "lora"),
                           ("--use_peft --load_in_4bit", "lora"),
                           ("--optimizer_offload", "offload")):
            work = Work(8, 8, 512, 512, 32, bf16=True, state=state, max_logits=2 ** 26,
                        four_bit="4bit" in way)
            again = Work(**{**vars(work), "gradient_checkpointing": True})
            held = footprint(config, parameters, work)["state"] / GB
            cells = []
            for gb in sizes:
                rows, most = (fits(config, parameters, w, gb * GB) for w in (work, again))
                cells.append(str(rows) if rows else f"{most} GC" if most else "-")
            title = name if state == "full" else ""
            lines.append(f"{title:14}{way:26}{held:6.1f} GB" + "".join(f"{c:>8}" for c in cells))
    return lines


def write_json(path, result):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="the shortest response, one model")
    parser.add_argument("--json", default="results/memory.json",
                        help="where the numbers go (default: %(default)s)")
    parser.add_argument("--script", action="store_true", help="only the updates of train.py")
    args = parser.parse_args(argv)
    script = through_the_script(*(((*SCRIPT[:2], 2, *SCRIPT[3:]),) if args.quick else ()))
    print(f"an update of the script, {script['layers']} layers, {script['tokens']} tokens")
    for flag, (peak, seconds) in script["ways"].items():
        print(f"  {flag or 'as it is':48}{peak:7} MB{seconds:8.2f} CPU s")
    if args.script:
        kept = json.loads(Path(args.json).read_text()) if Path(args.json).exists() else {}
        return write_json(args.json, {**kept, "script": script})
    sizes = (256,) if args.quick else (256, 1024, 4096)
    result = {"script": script, "vocabulary": vocabulary(sizes), "estimate": {}}
    print("peak memory in MB, one response of T tokens, vocabulary 151,936\n")
    print(f"{'T':>6}  {'log-probs:  ours':>16} {'at once':>8} {'TRL':>6}   {'update:  ours':>14} "
          f"{'at once':>8} {'TRL':>6}")
    for T, sides in result["vocabulary"].items():
        cell = lambda name, i: f"{sides[name][i]:,}" if name in sides else "-"
        print(f"{T:6}  {cell('ours', 0):>16} {cell('at once', 0):>8} {cell('trl', 0):>6}   "
              f"{cell('ours', 1):>14} {cell('at once', 1):>8} {cell('trl', 1):>6}")
    print(f"\n{'against measured peaks of an update':50}{'measured':>10}{'estimated':>11}"
          f"{'ratio':>7}")
    for name, (shape, work) in CHECKS.items():
        real, estimate = measured(shape, work)
        result["estimate"][name] = {"measured_mb": round(real / MB, 1),
                                    "estimated_mb": round(estimate / MB, 1)}
        print(f"  {name:48}{real / MB:7.1f} MB{estimate / MB:8.1f} MB{estimate / real:7.2f}")
    cases = simulated_cases(list(MODELS)[:1] if args.quick else list(MODELS))
    found = simulated(cases)
    result["simulated"] = found
    print(f"\n{'against simulated peaks, 8 rows of 512 + 512 tokens':50}{'simulated':>10}"
          f"{'estimated':>11}{'ratio':>7}")
    for r in found:
        peak = r["peak"] / GB
        estimate = r["estimate"] / GB
        what = f"{r['model']}, {r['way']}, {r['layers']} layers"
        print(f"  {what:48}{peak:7.2f} GB{estimate:8.2f} GB"
              f"{estimate / peak:7.2f}")
    error = max(abs(r["estimate"] / r["peak"] - 1) for r in found)
    result["fits"] = fits_table(error)
    print("\n" + "\n".join(result["fits"]))
    write_json(args.json, result)
    print(f"\nnumbers: {args.json}")


if __name__ == "__main__":
    main()
