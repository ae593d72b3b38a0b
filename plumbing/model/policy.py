"""Load the policy: a checkpoint, checked before use, or the built-in tiny MoE after its supervised
warm-up (cold_start.py)."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moe import TinyMoE
from plumbing.model.adapters import find_base_model, is_adapter, read_adapters
from plumbing.model.chat import add_turn_end
from plumbing.model.cold_start import load_cold_start
from plumbing.refusal import Refusal
from plumbing.speed.fast import MIN_PREFIX, fast_response_logp, fast_sample
from rollout import response_logp, sample

CLOSE = 1e-3            # largest rounding error of a log-prob, relative to 1 + |log-prob|, in nats


def load_policy(settings, task, device, folder=None, transform=lambda policy: policy,
                base_only=False):
    """(policy, tokenizer) on the device in float32: a checkpoint, ours or Hugging Face's, or the
    built-in tiny MoE. transform: a function applied to the loaded policy. base_only: of an
    adapter's checkpoint, load its base model alone.

    Raises Refusal for a checkpoint that cannot be read (pickled weights and remote code are not),
    and for a model whose log-probs would be wrong in this code without an error.
    """
    name = folder or settings.model_name_or_path
    if name is None:
        policy, tokenizer = load_cold_start(settings, task, device)
        return transform(policy).to(device), tokenizer
    policy, tokenizer = read_checkpoint(str(name), base_only)
    if task and task.chat_template:
        add_turn_end(policy, tokenizer)
    policy = transform(policy).to(device).eval()
    check_log_probs(policy, tokenizer)
    longest = find_max_length(policy)
    if task and longest and task.max_prompt_length + task.max_completion_length > longest:
        raise Refusal(f"{name} has {longest} positions: lower --max_prompt_length "
                      f"{task.max_prompt_length} or --max_completion_length "
                      f"{task.max_completion_length}, whose sum may be at most that")
    return policy, tokenizer


def read_checkpoint(name, base_only=False):
    """(policy, tokenizer) from a folder or the hub, in float32, with its adapters, if any, merged.
    """
    if is_adapter(name):
        policy, tokenizer = read_checkpoint(find_base_model(name))
        if base_only:
            return policy, tokenizer
        policy = read_adapters(policy, name)
    else:
        try:
            policy, lacking = read_model(name)
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, SafetensorError) as error:
            where = "" if Path(name).is_dir() else "there is no such folder, and the hub says: "
            raise Refusal(f"{name} cannot be loaded: {where}{' '.join(str(error).split())[:300]}"
                          ) from error
        if lacking:
            raise Refusal(f"{name}: its weights lack {', '.join(lacking)}, which would be random "
                          "numbers")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    policy.name_or_path = name
    return policy, tokenizer


def read_model(name):
    """(the model, the names of the weights that its checkpoint lacks)."""
    if AutoConfig.from_pretrained(name).model_type == "qwen3_moe":
        return TinyMoE.from_pretrained(name), []
    model, loading = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, use_safetensors=True, output_loading_info=True)
    return model, sorted(loading["missing_keys"])


# ---------------------------------------------------------------- refused: what would be wrong here

def find_max_length(policy):
    """The largest number of tokens in a row; None: any number. Without rotary positions a model
    has a table of positions that ends (GPT-2, OPT)."""
    rope = getattr(policy.config, "rope_parameters", None)
    return None if rope else getattr(policy.config, "max_position_embeddings", None)


@torch.no_grad()
def check_log_probs(policy, tokenizer):
    """Refuse a model whose log-probs would be wrong in padded batches. The log-probs of sampling
    and of scoring, plain and fast, with padding and a shared prefix, must equal those of the
    model's own logits for each unpadded sequence by itself."""
    ids = [(7 * i + 3) % policy.config.vocab_size for i in range(MIN_PREFIX + 8)]
    prompts = [ids[:-5], ids[:-6] + ids[-4:]]  # they begin alike and are of unequal length
    uniforms = torch.tensor([[0.1, 0.3, 0.5], [0.9, 0.7, 0.5]]).repeat(2, 1)        # [B, T]
    for draw, score in ((sample, response_logp), (fast_sample, fast_response_logp)):
        drawn = draw(policy, tokenizer, prompts, 2, 3, uniforms=uniforms)
        expected = score_one_by_one(policy, drawn)                                  # [B, T]
        scored = score(policy, drawn, entropy=False).logp                           # [B, T]
        for logp in (drawn.sampler_logp, scored):
            error = (logp - expected).abs()                                         # [B, T]
            if not (error < CLOSE * (1 + expected.abs())).all():         # False for NaN
                raise Refusal(f"{type(policy).__name__} is not supported: in padded batches its "
                              f"log-probs are off by {error.max():.1g} nats")


def score_one_by_one(model, rollout):
    """Log-probs [B, T] of the response tokens from the model's logits, one forward per response,
    without padding."""
    logp = torch.zeros_like(rollout.sampler_logp)                                   # [B, T]
    for row, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]                  # [p]
        ids = torch.cat([prompt, rollout.response_ids[row][mask]])                  # [p+t]
        every = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)   # [p+t-1, V]
        logp[row, mask] = every.gather(-1, ids[1:, None])[len(prompt) - 1:, 0]      # [t]
    return logp
