"""More than one process: torch.distributed, as `torchrun --nproc_per_node=N train.py …` starts it.

Every process holds the whole rollout batch and computes its share of the three expensive parts:
sampling, scoring, forward and backward. Everything else (advantages, weights, mini-batches, the
next prompts) is computed by every process from the same numbers, so the loss equals that of a
single process. Token weights are computed over the whole mini-batch (losses.token_weights), hence
gradients must be *summed* over processes; DDP and FSDP2 average them, so the loss is multiplied by
the number of processes. Only the first process writes to the run folder, which all must be able to
read.
"""

import atexit
import copy
import io
import os
import sys
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from plumbing.parallel import devices
from plumbing.refusal import Refusal


def start(settings):
    """Join the other processes if torchrun started several. Returns the device of this process.

    Raises Refusal if --device does not exist or the batch does not divide evenly over the
    processes.
    """
    device_type = devices.find_device_type(settings)
    local = int(os.environ.get("LOCAL_RANK", 0))
    cuda = device_type == "cuda"
    device = torch.device("cuda", local) if cuda else torch.device(device_type)
    if cuda:
        torch.cuda.set_device(device)
        # cuDNN's attention, the first choice on Hopper, plans again for each length of the cache:
        # tens of milliseconds per token. The other kernels do not.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
    if settings.autocast_dtype:      # norms keep float32 weights, of which torch would warn
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    if settings.prompts_per_step // settings.steps_per_generation % world():
        raise Refusal(f"--prompts_per_step {settings.prompts_per_step} / --steps_per_generation "
                      f"{settings.steps_per_generation} prompts per mini-batch cannot be "
                      f"divided equally among {world()} processes")
    return device


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n):
    """This process's share of n items, as a slice."""
    return slice(rank() * n // world(), (rank() + 1) * n // world())


def gather(part):
    """An object of each process, tensors and all -> the list of them by rank, on this device."""
    if world() == 1:
        return [part]
    parts = [None] * world()
    buffer = io.BytesIO()
    torch.save(part, buffer)
    dist.all_gather_object(parts, buffer.getvalue())
    nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else "cpu"
    # not weights_only: our own processes wrote it
    return [torch.load(io.BytesIO(data), device, weights_only=False) for data in parts]


def share_reward_components(reward_components):
    """Task.reward_components that shares the groups among the processes; every process gets the
    whole result."""
    def shared(texts, problems, ids, games):
        rows = share(len(texts))             # whole groups: `start` has refused other numbers
        parts = reward_components(texts[rows], problems[rows], ids[rows], games[rows])
        return torch.cat(gather(parts))                                             # [B, K]
    return shared


def on_first(call):
    """Run call() in the first process only. Every process gets its result, or the Refusal that it
    raised."""
    if world() == 1:
        return call()
    result = [None]
    if rank() == 0:
        try:
            result = [call()]
        except Refusal as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], Refusal):
        raise result[0]
    return result[0]


def wrap(actor, shard):
    """Wrap the actor with DDP (one replica per process) or with FSDP2 (each decoder layer, and the
    rest, is split into shards that are gathered when they are used)."""
    if world() == 1:
        return actor
    if not shard:
        return DistributedDataParallel(actor)
    for tensor in actor.state_dict().values():               # DDP does this by itself
        dist.broadcast(tensor, 0)
    # in a list, so that it is not a submodule and is neither trained nor saved
    actor.shell = [copy.deepcopy(actor.policy).requires_grad_(False)]
    for layer in actor.policy.base_model.layers:
        fully_shard(layer)
    # reshard: outside a forward every parameter is a shard
    return fully_shard(actor, reshard_after_forward=True)


@contextmanager
def gathered(actor):
    """The policy for sampling, with unsharded weights, because each process samples token by token
    at its own pace. For a sharded policy it is a plain copy, which uses memory only inside this
    block."""
    if not hasattr(actor, "shell"):
        yield actor.policy
        return
    pairs = list(zip(actor.shell[0].parameters(), actor.policy.parameters(), strict=True))
    for whole, shard in pairs:
        whole.data = shard.detach().full_tensor()
    yield actor.shell[0]
    for whole, shard in pairs:
        whole.data = whole.data.new_empty(0)


AT_STOP = []     # functions to call at the end of a run, before the other processes are left


def stop():
    """Leave the other processes at the end of a run.

    Call it when nothing refers to the actor any more. DDP refers to the process group too, and if
    its reference is the last one, the process can hang: DDP's destructor waits for gloo's threads
    while it holds Python's global lock (GIL), which these threads need to free their tensors. The
    group's own destructor releases the lock.
    """
    while AT_STOP:
        AT_STOP.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave():
    """End a process of torchrun's at once. With FSDP2 torch's caches refer to the group, so that
    gloo's threads outlive it: Python, as it ends, is aborted by one that frees a tensor then."""
    if "RANK" in os.environ:
        atexit._run_exitfuncs()          # of trackers
        sys.stdout.flush()
        os._exit(0)
