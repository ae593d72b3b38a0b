"""Token steps of sampling, eager and as CUDA graphs (--cuda_graphs): milliseconds per token and
mismatch_kl of both; the kernels of an eager step; TF32's speed, and its error of log s. A JSON line
for each.

    python benchmarks/decoding.py             # on a GPU; --quick: tiny models, also on a CPU

Prompts are short and hardly a response ends, so a row draws all of its tokens. Weights are random.
"""

import argparse
import json
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.data.running_sum import builtin_tokenizer  # noqa: E402
from plumbing.speed.fast import fast_sample  # noqa: E402
from plumbing.speed.graphs import CudaGraph, guard  # noqa: E402
from rollout import response_logp  # noqa: E402
from session.metrics import mismatch_kl  # noqa: E402
from shapes import SHAPES, random_model  # noqa: E402

TOKENIZER = builtin_tokenizer("".join(map(chr, range(32, 127))) + "\n")
TINY = ("qwen2", 64, 2, 4, 2, 128, 128)
EXPERTS = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=128)
# model, format, rows, tokens; MoE: the 0.5B shape with experts
CASES = (("0.5B", "float32", 16, 256), ("0.5B", "float32", 64, 256), ("0.5B", "float32", 128, 256),
         ("0.5B", "float32", 256, 128), ("0.5B", "float32, TF32", 128, 256),
         ("0.5B", "bfloat16", 16, 128), ("0.5B", "bfloat16", 128, 128),
         ("0.5B", "bfloat16", 256, 128), ("MoE", "bfloat16", 128, 64),
         ("MoE", "float32", 128, 64), ("1.5B", "bfloat16", 128, 128))
LENGTHS = (5, 20, 60, 125, 250)


def make_model(name, form, device, quick):
    """A model of random weights that never ends a response."""
    shape = TINY if quick else SHAPES["Qwen/Qwen2.5-1.5B" if name == "1.5B" else
                                      "Qwen/Qwen2.5-0.5B"]
    kind, more = ("qwen3_moe", EXPERTS) if name == "MoE" else (shape[0], {})
    with torch.device(device):
        model = random_model(kind, *shape[1:], eos_token_id=95, initializer_range=0.02, **more)
    model.get_output_embeddings().weight.data[95] = 0.0
    return model.to(getattr(torch, form.split(",")[0])).eval()


@contextmanager
def precision(form):
    """torch's precision of float32 products."""
    torch.set_float32_matmul_precision("high" if "TF32" in form else "highest")
    yield
    torch.set_float32_matmul_precision("highest")


def draw(model, rows, tokens, record=None):
    """(rollout, seconds) of one call of fast_sample with `rows` responses in groups of 8."""
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(rows, tokens, generator=generator)                        # [B, T]
    prompts = [[20 + i % 60] * (8 + i % 9) for i in range(rows // 8)]
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    rollout = fast_sample(model, TOKENIZER, prompts, 8, tokens, 1.0, uniforms, drop_every=16,
                          record=record)
    wait()
    return rollout, time.perf_counter() - start


@torch.no_grad()
def score(model, rollout):
    """Log-probs [B, T], eight rows at a time."""
    parts = [rollout.take(rows) for rows in torch.arange(len(rollout.mask)).split(8)]
    return torch.cat([response_logp(model, part, entropy=False).logp for part in parts])


def compare(name, form, rows, tokens, device, quick):
    """Both ways of one case, after a short call of each that warms up."""
    model = make_model(name, form, device, quick)
    guard.works = True
    found = {"model": name, "format": form, "rows": rows, "tokens": tokens}
    with precision(form):
        for record in (None, CudaGraph):
            draw(model, rows, 20, record)
        for way, record in (("eager", None), ("graph", CudaGraph)):
            rollout, seconds = draw(model, rows, tokens, record)
            kl = mismatch_kl(score(model, rollout), rollout.sampler_logp, rollout.mask)
            found |= {f"{way}_ms": seconds / tokens * 1e3, f"{way}_kl": kl}
    return found | {"recorded": rollout.replayed and guard.works,
                    "transformers": transformers.__version__}


def profile_steps(device, quick):
    """Where the time of 32 eager token steps goes: [kernel or operator, calls, milliseconds]."""
    model = make_model("0.5B", "float32", device, quick)
    draw(model, 64, 8)
    with torch.profiler.profile() as profile:
        draw(model, 64, 32)
    clock = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"    # in µs
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, clock))
    return {"profile": [[event.key[:60], event.count, round(getattr(event, clock) / 1e3, 2)]
                        for event in events[:10]]}


@torch.no_grad()
def measure_tf32(device, quick):
    """The error of log s with TF32 against the number of tokens, in nats (root mean square)."""
    model = make_model("0.5B", "float32", device, quick)
    rollout, _ = draw(model, 32, max(LENGTHS))
    logps = []
    for form in ("float32", "float32, TF32"):
        with precision(form):
            logps.append(score(model, rollout))                                     # [B, T]
    d = (logps[1] - logps[0]).double()                                              # [B, T]
    error = {L: d.unfold(1, L, L).mean(-1).square().mean().sqrt().item() for L in LENGTHS
             if L <= d.shape[1]}
    return {"tf32_error_of_log_s": error}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models, a few tokens")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)              # as train.py: parallel/processes.py
    cases = [(name, form, 16, 24) for name, form, *_ in CASES] if args.quick else CASES
    stages = [lambda case=case: compare(*case, device, args.quick) for case in
              dict.fromkeys(cases)]
    more = [lambda measure=measure: measure(device, args.quick)
            for measure in (profile_steps, measure_tf32)]
    for stage in [*stages, *more]:
        try:
            found = stage()
        except Exception as error:           # whatever it was: reported, and on with the next one
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}",
                     "traceback": traceback.format_exc()[-1500:]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
