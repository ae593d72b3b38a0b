"""Peak memory of an update on a GPU that is not there (tests/gpu/pretend_device.py; needs g++).

    python benchmarks/simulate.py FLAGS OF TRAIN.PY      # one run of a model of shapes.py
    python benchmarks/simulate.py                        # docs/speed.md's: results/simulated.json

A run's figure is that of its update: prompts of --max_prompt_length tokens, answers of
--max_completion_length, weights and optimizer included, without the allocator's rounding and
cuBLAS's workspaces; leave a tenth of the GPU free. shapes.py has the models. Two micro-batches make
the step, as gradients of the first are there during the second. Not simulated: sampling, which
needs less, 4 bit, vLLM.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/gpu")]
from pretend_device import gpu  # noqa: E402  before torch

import torch  # noqa: E402

from features.lora import add_adapters  # noqa: E402
from losses import policy_loss  # noqa: E402
from plumbing.model.actor import make_scorer  # noqa: E402
from plumbing.model.halves import halve_matrices  # noqa: E402
from session.arguments import parse  # noqa: E402
from shapes import SHAPES, random_model, random_rollout  # noqa: E402
from timing import RESULTS, publish, table  # noqa: E402

ROWS = ("--dataset_name x --max_prompt_length 512 --max_completion_length 512 --prompts_per_step 8 "
        "--micro_batch_size 8")
WAYS = {"bfloat16": "--bf16 true", "float32": "--bf16 false",
        "float32, `--gradient_checkpointing`": "--bf16 false --gradient_checkpointing",
        "float32, `--use_peft`": "--bf16 false --use_peft",
        "bfloat16, `--use_peft`": "--bf16 true --use_peft"}


def find_shape(name):
    """The shape of a model whose name begins with one of SHAPES. Raises ValueError for another."""
    for start, shape in SHAPES.items():
        if name and name.startswith(start):
            return shape
    raise ValueError(f"--model_name_or_path {name}: not among {', '.join(SHAPES)}; add its shape "
                     "to SHAPES of benchmarks/shapes.py")


def simulated(flags, layers=None):
    """Peak bytes of an update of a run of train.py with these flags, one string. layers: fewer than
    the model has."""
    settings = parse(flags.split())
    kind, D, L, *rest = find_shape(settings.model_name_or_path)
    with torch.device("meta"):
        policy = random_model(kind, D, layers or L, *rest)
    policy.tie_weights()
    if settings.use_peft:
        policy = add_adapters(policy.float(), settings).to_empty(device="meta")
    if settings.half:
        halve_matrices(policy, settings.half)
    G = settings.num_generations
    rows = settings.mini_batch_rows
    before = gpu.now
    with gpu:
        rows = min(settings.micro_batch_size or rows, rows)
        batch = random_rollout(100, -(-rows // G), min(G, rows), settings.max_prompt_length,
                               settings.max_completion_length, unseen=7, device="cuda:0")
        actor = make_scorer(settings, policy.to("cuda:0").eval())
        trained = [p for p in actor.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        for micro_batches in (1, 2):                         # the first step makes AdamW's moments
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with gpu.phase("update"):
                    logp = actor(batch).logp
                    advantages = torch.ones(len(logp), device="cuda:0")
                    policy_loss("gspo", logp, logp.detach(), advantages, batch.mask)[0].backward()
                    del logp
            with gpu.phase("step"):
                optimizer.step()
    peak = max(gpu.peak["update"], gpu.peak["step"]) - before
    gpu.reset()
    return peak


def texts(found):
    """The table of docs/speed.md, in GB."""
    rows = [(name.split("/")[1], *(f"{peaks[way] / 1e9:.1f}" for way in WAYS))
            for name, peaks in found["peaks"].items()]
    return {"simulated": table(("peak GB of an update", *WAYS), *rows)}


def main(argv):
    gpu.shapes = True
    if argv:
        return print(f"{simulated(' '.join(argv)) / 1e9:.1f} GB at the peak of an update")
    found = {"flags": ROWS, "peaks": {}}
    for name in SHAPES:
        found["peaks"][name] = {
            way: simulated(f"--model_name_or_path {name} {ROWS} {flags}")
            for way, flags in WAYS.items()}
        print(name, found["peaks"][name], flush=True)
    publish(RESULTS / "simulated.json", found, texts)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.exit(print(__doc__))
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"simulate.py: {error}")
