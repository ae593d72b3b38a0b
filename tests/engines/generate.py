"""A sampler of one's own: transformers' generate, and the log-probs that it drew from.

    python train.py --model_name_or_path DIR --dataset_name rows.jsonl \\
        --sampler tests/engines/generate.py:GenerateSampler --old_logp sampler
"""

import torch

from plumbing.engines.responses import as_rollout, ending_tokens
from rollout import left_pad, pad_token


class GenerateSampler:
    def __init__(self, policy, tokenizer, max_new_tokens, temperature=1.0, stop=()):
        self.policy, self.tokenizer, self.max_new_tokens = policy, tokenizer, max_new_tokens
        self.temperature, self.stop = temperature, stop

    @torch.no_grad()
    def sample(self, prompts, group_size, uniforms=None, temperature=None):
        temperature = self.temperature if temperature is None else temperature
        pad = pad_token(self.tokenizer)
        ids, mask = left_pad(prompts, pad, self.policy.device)                  # [Q, P]
        ids, mask = (x.repeat_interleave(group_size, 0) for x in (ids, mask.long()))  # [B, P]
        out = self.policy.generate(
            ids, attention_mask=mask, max_new_tokens=self.max_new_tokens, pad_token_id=pad,
            eos_token_id=ending_tokens(self.policy, self.tokenizer, self.stop),
            do_sample=temperature > 0, temperature=temperature or 1.0,
            top_k=0, top_p=1.0, repetition_penalty=1.0,     # not the checkpoint's own settings
            return_dict_in_generate=True, output_scores=True)
        response = out.sequences[:, ids.shape[1]:]                              # [B, T]
        logp = torch.stack(out.scores, 1).float().log_softmax(-1)               # [B, T, V]
        logp = logp.gather(-1, response[..., None]).squeeze(-1)                 # [B, T]
        return as_rollout(self.policy, self.tokenizer, prompts, group_size,
                          response.tolist(), logp.tolist(), self.stop)
