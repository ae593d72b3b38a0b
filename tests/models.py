"""Tiny models and tokenizers for tests: any family of transformers with random weights."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoConfig, AutoModelForCausalLM, GenerationConfig,
                          PreTrainedTokenizerFast)

from moe import TinyMoE
from plumbing.data.running_sum import builtin_tokenizer
from rollout import response_logp

SIZES = dict(vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, intermediate_size=48, initializer_range=0.1,
             bos_token_id=None, eos_token_id=15, pad_token_id=16)           # builtin_tokenizer's
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def make(family="qwen3", seed=0, **sizes):
    """A model of a family by its name in transformers ("qwen3", "mixtral", "gpt2", …), in eval
    mode; "tiny_moe" is moe.TinyMoE. Whatever sizes changes of SIZES, or adds to it."""
    torch.manual_seed(seed)
    if "mo" in family or family == "mixtral":
        sizes = MOE | sizes
    if "num_experts" in sizes:                               # Mixtral and GPT-OSS call it so
        sizes["num_local_experts"] = sizes["num_experts"]
    sizes = SIZES | sizes
    sizes = {name: size for name, size in sizes.items() if name != "head_dim" or size}
    if family == "tiny_moe":
        return TinyMoE(AutoConfig.for_model("qwen3_moe", **sizes)).eval()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()


def saved(folder, family="qwen3", tokenizer=None, **sizes):
    """A checkpoint of a model and a tokenizer (builtin_tokenizer unless given), its folder as str.
    The model has the tokenizer's vocabulary and end token."""
    tokenizer = tokenizer or builtin_tokenizer()
    of_tokenizer = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id)
    make(family, **of_tokenizer | sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def for_chats(policy, ends=()):
    """The policy with further end tokens, and with settings for chats that no sampler may read."""
    policy.generation_config = GenerationConfig(
        eos_token_id=[SIZES["eos_token_id"], *ends], pad_token_id=SIZES["pad_token_id"],
        do_sample=True, top_k=5, top_p=0.8, repetition_penalty=1.3)
    return policy


def ascii_tokenizer():
    """One token per printable ASCII character and line break."""
    return builtin_tokenizer("".join(map(chr, range(32, 127))) + "\n")


def chat_tokenizer(template):
    """One token per printable character, and special tokens of chat templates such as CHATML."""
    tokenizer = ascii_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [
        "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|return|>"]})
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(text=("a\nb a\nb max(1,2)=2\nmax(3,1)=3\n the the then 12 12 123",) * 9):
    """A byte-pair tokenizer of 300 tokens, trained on lines of text; "<eos>" is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>",
                                   pad_token="<eos>")


# ----------------------------------------------------------- what a fast path is compared with

def own_scores(model, rollout, temperature=1.0):
    """(log-probs, entropies) of all responses, each computed alone, without padding or cache:
    [B, T], 0 outside the mask."""
    chosen, entropies = [], []
    for i, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]                      # [p]
        answer = rollout.response_ids[i][mask]                                      # [t]
        logits = model(input_ids=torch.cat([prompt, answer])[None], use_cache=False).logits[0]
        logp = (logits[len(prompt) - 1:-1] / temperature).log_softmax(-1)           # [t, V]
        pad = lambda x: torch.nn.functional.pad(x, (0, len(mask) - len(x)))
        chosen.append(pad(logp.gather(-1, answer[:, None])[:, 0]))
        entropies.append(pad(-(logp.exp() * logp).sum(-1)))
    return torch.stack(chosen), torch.stack(entropies)


def own_logp(model, rollout, temperature=1.0):
    """The log-probs of all responses, each computed alone: [B, T], 0 outside the mask."""
    return own_scores(model, rollout, temperature)[0]


def gap(policy, rollout, temperature=1.0):
    """The largest difference of a log-prob that the sampler recorded from the policy's own."""
    own = response_logp(policy, rollout, temperature, entropy=False).logp           # [B, T]
    return (own - rollout.sampler_logp)[rollout.mask].abs().max().item()


def check_ends(rollout, tokenizer, limit, ends=(), stop=()):
    """Every response ends with its first end token or stop string, or is cut off at the limit."""
    for ids, mask, cut in zip(rollout.response_ids, rollout.mask, rollout.truncated):
        own = ids[mask].tolist()
        found = [n for n in range(1, len(own) + 1) if own[n - 1] in (tokenizer.eos_token_id, *ends)
                 or tokenizer.decode(own[:n]).endswith(tuple(stop))]
        assert found == ([] if cut else [len(own)]) and (len(own) == limit or not cut)


def gradient(model, value):
    """d value / d weights, of all weights together: one vector."""
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
