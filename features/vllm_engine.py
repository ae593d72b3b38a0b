"""--sampler vllm: the same `sample` by vLLM in this process (tests/requirements-vllm.txt).

vLLM holds a copy of the weights. Whenever the policy has changed since the last call, all its
weights are transferred, and a few of the tokens sampled then are scored by the policy: if the
weights did not arrive, the run stops (a tied LM head, for example, is missing from
named_parameters(); the log-probs are then 0.3 nats off after one update). Rollouts and evaluations
share one engine per process.

Tested on a CPU. What a GPU does differently has never been run: `sleep` and `wake_up`, which free
vLLM's memory while the policy is trained, the share of memory, CUDA graphs.
"""

import os
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.random import fork_rng

from plumbing.engines.responses import as_rollout, ending_tokens
from plumbing.model.copies import has_adapters, plain_copy
from plumbing.parallel import processes
from plumbing.refusal import Refusal
from rollout import Sampler, response_logp, token_ids

GPU_SHARE = 0.3              # of a GPU's memory; TRL's default
CPU_CACHE = 2 ** 30          # bytes of the KV cache on a CPU

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",       # in this process, where the weights are
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",       # training keeps its threads on all cores
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmSampler(Sampler):
    """Samples by vLLM, with the arguments of rollout.Sampler and

    dtype           number format of vLLM's weights and arithmetic, "float32", "bfloat16", "float16"
    prompt_tokens   the longest prompt
    memory_share    share of the device's memory that vLLM may use; None: GPU_SHARE, or on a CPU
                    CPU_CACHE besides the weights
    """

    def __init__(self, *arguments, dtype="float32", prompt_tokens=1024, memory_share=None):
        super().__init__(*arguments)
        self.dtype = getattr(torch, dtype)
        self.ends = ending_tokens(self.policy, self.tokenizer, self.stop)
        self.engine = engine_for(self.policy, self.tokenizer, dtype,
                                 prompt_tokens + self.max_new_tokens, memory_share)

    @torch.no_grad()
    def sample(self, prompts, group_size, uniforms=None, temperature=None, limits=None):
        """See rollout.Sampler.sample; row i is drawn with a seed made of uniforms[i]. Raises
        Refusal if vLLM does not sample from the policy's weights."""
        temperature = self.temperature if temperature is None else temperature
        prompts = token_ids(self.tokenizer, prompts)
        rows = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(group_size)]
        limits = [self.max_new_tokens] * len(rows) if limits is None else limits.tolist()
        settings = [dict(seed=seed, temperature=temperature, max_tokens=limit,
                         logprobs=0, stop_token_ids=self.ends, stop=list(self.stop))
                    for seed, limit in zip(row_seeds(uniforms, len(rows)), limits)]
        with self.engine.awake():
            changed = self.engine.update(self.policy)
            responses = self.engine.generate(rows, settings)
        rollout = as_rollout(self.policy, self.tokenizer, prompts, group_size, *responses,
                             self.stop)
        if changed:
            check_agreement(self.policy, rollout, temperature, self.dtype)
        return rollout


def row_seeds(uniforms, rows):
    """A seed below 2^32 for every row: a function of its first two random numbers (uniforms
    [B, T]), so that a resumed run draws the same, and one with another limit T, too. uniforms None:
    `rows` new seeds."""
    if uniforms is None:
        return torch.randint(2 ** 32, (rows,)).tolist()
    return [zlib.crc32(row.numpy().tobytes()) for row in uniforms[:, :2].cpu()]


ROWS = 8         # responses that are compared, of one prompt

# The largest mean difference of a log-prob in nats. Measured on SmolLM2: 6e-6 in float32, 0.006 in
# float16, 0.03 to 0.05 in bfloat16, where missing weights show only after a few updates.
NOISE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


@torch.no_grad()
def check_agreement(policy, rollout, temperature, dtype):
    """Compare the log-probs that vLLM recorded with those of the policy.

    temperature: of sampling; 0: greedy, where log-probs have temperature 1. dtype: of vLLM's
    arithmetic. Raises Refusal if they differ by more than rounding in `dtype` explains."""
    part = rollout.take(torch.arange(min(ROWS, rollout.group_size)))
    logp = response_logp(policy, part, temperature or 1.0, entropy=False).logp      # [b, T]
    difference = (logp - part.sampler_logp)[part.mask].abs().mean().item()
    if not difference <= NOISE[dtype]:                       # NaN, too
        raise Refusal(
            f"--sampler vllm: its log-probs differ from the policy's by {difference:.2g} nats "
            f"per token, more than {NOISE[dtype]:g}, which rounding in {str(dtype)[6:]} explains: "
            "it does not sample from the weights that are trained; leave out --sampler")


RUNNING = {}     # {(policy, settings): Engine}, at most one


def engine_for(policy, tokenizer, dtype, longest, memory_share):
    """The engine of this process for this policy and these settings. longest: tokens of a prompt
    and its response."""
    longest = min(longest, getattr(policy.config, "max_position_embeddings", None) or longest)
    key = (policy, dtype, longest, memory_share)
    if key not in RUNNING:
        close_engine()                                       # its memory is needed for the new one
        RUNNING[key] = start(policy, tokenizer, dtype, longest, memory_share)
    return RUNNING[key]


def close_engine():
    """Shut down the engine of this process, if there is one: before the process group that it may
    share is left."""
    while RUNNING:
        _, engine = RUNNING.popitem()
        engine.llm.llm_engine.engine_core.shutdown()


def start(policy, tokenizer, dtype, longest, memory_share):
    """A new Engine with the weights of the policy."""
    os.environ.update(ENVIRONMENT)
    processes.AT_STOP.append(close_engine)
    cpu = policy.device.type == "cpu"
    memory = {"gpu_memory_utilization": memory_share or GPU_SHARE}
    if cpu and memory_share is None:
        memory = {"kv_cache_memory_bytes": CPU_CACHE}
    options = {}
    if cpu:      # no prompt in parts: vLLM then rewinds a row's generator, which a CPU's cannot do
        options = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(longest, 2048))
    if processes.world() > 1:
        options["distributed_executor_backend"] = "external_launcher"     # torchrun started us
    folder = processes.on_first(lambda: saved(policy, tokenizer))
    try:
        with fork_rng():                                     # vLLM seeds the global generator
            from vllm import LLM, SamplingParams
            llm = LLM(model=folder, dtype=dtype, max_model_len=longest, seed=0,
                      logprobs_mode="processed_logprobs",    # at the temperature of sampling
                      generation_config="vllm",              # no top-p or penalties of the folder's
                      enforce_eager=cpu, enable_sleep_mode=not cpu, use_tqdm_on_load=False,
                      disable_log_stats=True, **memory, **options)
    finally:
        processes.gather(None)                               # every process has read it
        processes.on_first(lambda: shutil.rmtree(folder))
    return Engine(llm, SamplingParams, cpu)


def saved(policy, tokenizer):
    """The name of a new folder with the policy as a checkpoint."""
    folder = tempfile.mkdtemp()
    plain(policy).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Engine:
    """vLLM's LLM and what it holds."""

    llm: object
    sampling_params: type
    cpu: bool
    pushed: tuple | None = None  # digests of the policy's weights at the last transfer

    @contextmanager
    def awake(self):
        """Inside the block vLLM has its memory; on a GPU it is free otherwise."""
        if not self.cpu and self.pushed:                     # a new engine is awake
            self.llm.wake_up()
        try:
            yield
        finally:
            if not self.cpu:
                self.llm.sleep(level=1)

    def update(self, policy):
        """Transfer the weights if the policy has changed. Returns whether it had."""
        digests = tuple(torch.hash_tensor(p).item() for p in policy.parameters())
        if digests == self.pushed:
            return False
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        if self.cpu:
            forget_packed_experts(runner.model)
        # state_dict, not named_parameters: the latter leave out a tied LM head
        runner.reload_weights(weights_iterator=iter(plain(policy).state_dict().items()))
        self.llm.reset_prefix_cache()
        self.pushed = digests
        return True

    def generate(self, rows, settings):
        """(token ids, their log-probs) of a response per row, lists of B lists each."""
        with fork_rng():
            outputs = self.llm.generate(
                rows, [self.sampling_params(**row) for row in settings], use_tqdm=False)
        responses = [output.outputs[0] for output in outputs]
        ids = [list(row.token_ids) for row in responses]
        logps = [[at[token].logprob for at, token in zip(row.logprobs, row.token_ids)]
                 for row in responses]
        return ids, logps


def forget_packed_experts(model):
    """vLLM 0.32 packs the experts of a mixture for the CPU only when it makes their kernel. A
    second transfer would leave them unpacked, to be read as packed ones: without their kernel,
    they are packed again."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def plain(policy):
    """The policy without adapters: itself, or a copy with the adapters merged."""
    return plain_copy(policy) if has_adapters(policy) else policy
