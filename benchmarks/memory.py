"""Peak memory of log-prob and update passes against the size of the vocabulary, on a CPU.

    python benchmarks/memory.py            # --quick: a response of 256 tokens in place of 4,096
                                           # TRL's side needs pip install trl==1.16.0

Peaks come from the CPU allocator: what a pass added. The backbone has width 64, the vocabulary
Qwen's 151,936 tokens, so that nearly all memory is for logits. `ours`: the LM head in chunks of
rows, which the backward pass recomputes. benchmarks/simulate.py counts the memory of whole models
on a GPU.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.speed.fast import fast_response_logp  # noqa: E402
from shapes import random_model, random_rollout  # noqa: E402
from timing import MB, command_line, peak_bytes, publish  # noqa: E402

VOCABULARY = 151936


def passes(compute_logp, model):
    """Peak MB of a log-prob pass without gradient, and of a forward with its backward pass."""
    with torch.no_grad():
        logp = peak_bytes(lambda: compute_logp(model)) / MB
    return round(logp), round(peak_bytes(lambda: compute_logp(model).sum().backward()) / MB)


def vocabulary(T):
    """{T: {side: peak MB of (log-prob pass, update)}}, one response of T tokens."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError:
        add_fused_lm_head = None
    batch = random_rollout(VOCABULARY, 1, 1, 16, T)
    ids = torch.cat([batch.prompt_ids, batch.response_ids], 1)
    labels = ids.clone()
    labels[:, :16] = -100
    sides = {"ours": lambda m: fast_response_logp(m, batch, entropy=False).logp}
    if add_fused_lm_head:
        sides["trl"] = lambda m: m(input_ids=ids, attention_mask=torch.ones_like(ids),
                                   labels=labels, fused_lm_head=True).log_probs
    found = {}
    for name, compute_logp in sides.items():
        model = random_model("qwen2", 64, 1, 4, 4, 128, VOCABULARY, tied=False)
        if name == "trl":                                    # as GRPOTrainer sets it up
            add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        found[name] = passes(compute_logp, model)
    return {str(T): found}


def texts(found):
    """Peaks of docs/speed.md in MB."""
    sides, = found["vocabulary"].values()
    return {f"peak {side}": f"{peak:,}" for side, (_, peak) in sides.items()}


def main(argv=None):
    args = command_line(__doc__, "memory.json", "a short response").parse_args(argv)
    publish(args.json, {"vocabulary": vocabulary(256 if args.quick else 4096)}, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
