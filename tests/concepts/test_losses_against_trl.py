"""losses.py against TRL 1.16's own loss code, called on the same tensors under the settings that
tools/export.py prints for it. python -m pytest tests/concepts/test_losses_against_trl.py

`GRPOTrainer._compute_loss` and `GMPOTrainer._compute_loss` run unchanged on a stand-in for `self`,
made of a GRPOConfig and a forward pass that returns our log-probs.
"""

import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import reference
from features.mismatch import mismatch_correction
from losses import high_entropy_mask, kl_penalty, policy_loss, token_weights
from reference import L_MAX
from session.arguments import parse
from tools.export import translate

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16", reason="pip install trl==1.16.0")
from trl import GRPOConfig  # noqa: E402
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

B, T, G = 12, 10, 4
SIZES = (f"--prompts_per_step 6 --num_generations {G} --steps_per_generation 2 "
         f"--max_completion_length {L_MAX}")


def mini_batch(empty=()):
    """Three groups of reference.ragged, one row of which has no loss token, nor have the rows
    `empty`; a ratio of 55, for what is capped; finite padding, as the libraries need it."""
    batch = reference.only(slice(0, B), reference.ragged(absurd=[-1.0]))
    batch.logp[0, 0] = batch.old_logp[0, 0] + 4
    batch.mask[list(empty)] = False
    batch.A[~batch.mask.any(-1)] = 0
    return batch._replace(logp=batch.logp.clamp(max=-1e-3).requires_grad_())


def gap():
    """log π_old - log π_sampler of the tokens of a batch, [B, T]."""
    generator = torch.Generator().manual_seed(2)
    return 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)


def our_loss(args, batch):
    """Our loss of a mini-batch with everything that may be added to it. The reference's log-probs
    are old_logp - 0.2, the entropies -0.3·logp."""
    logp, old_logp, A, mask, *_ = batch
    weights = token_weights(mask, args.reduction, group_size=G, max_length=L_MAX)
    rollout = SimpleNamespace(mask=mask, sampler_logp=old_logp - gap())
    loss, _ = policy_loss(args.row, logp, old_logp, A, mask, epsilon=args.epsilon,
                          epsilon_high=args.epsilon_high, weights=weights,
                          factors=mismatch_correction(args, old_logp, rollout))
    if args.beta:
        kl = kl_penalty(logp, old_logp - 0.2, mask)
        loss = loss + args.beta * (weights * kl).sum()
    entropy = (token_weights(mask, "token-mean") * -0.3 * logp).sum()
    return loss - args.entropy_coef * entropy


def gradient(loss, batch):
    return torch.autograd.grad(loss, batch.logp, retain_graph=True)[0]


def assert_same(ours, theirs, batch):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gradient(ours, batch), gradient(theirs, batch), rtol=1e-5,
                               atol=1e-10)
    assert gradient(ours, batch).any()


# -------------------------------------------------------------------------- TRL's own code

SINGLE = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                         pad_across_processes=lambda x, dim, pad_index: x,
                         gather_for_metrics=lambda x: x, sync_gradients=True)
COPIED = ("loss_type importance_sampling_level beta max_completion_length top_entropy_quantile "
          "use_vllm vllm_importance_sampling_correction off_policy_mask_threshold "
          "entropy_coef").split()


def trl_loss(config, batch, trainer_class=GRPOTrainer):
    """The loss of a mini-batch by TRL's own code: the sum over micro-batches, as Trainer adds up
    their gradients."""
    size, accumulated = config.per_device_train_batch_size, config.gradient_accumulation_steps
    assert size * accumulated == B
    updates = config.steps_per_generation // accumulated     # of a rollout batch
    completion = batch.mask.flip(-1).cumsum(-1).flip(-1) > 0             # with what a tool said
    ratio = vllm_ratio(config, batch.mask) if config.use_vllm else None
    ids = torch.zeros(size, T, dtype=torch.long)
    total = 0.0
    for start in range(0, B, size):
        part = slice(start, start + size)
        logp, old_logp = batch.logp[part], batch.old_logp[part]
        trainer = SimpleNamespace(
            **{name: getattr(config, name) for name in COPIED}, args=config, accelerator=SINGLE,
            epsilon_low=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            aux_loss_enabled=bool(config.router_aux_loss_coef), use_adaptive_entropy=False,
            _entropy_bonus_enabled=config.entropy_coef != 0,
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=accumulated,
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp, -0.3 * logp, None),
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            _metrics=defaultdict(lambda: defaultdict(list)))
        loss = trainer_class._compute_loss(trainer, None, dict(
            prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids,
            advantages=batch.A[part], completion_mask=completion[part].long(),
            tool_mask=(batch.mask | ~completion)[part].long(), old_per_token_logps=old_logp,
            importance_sampling_ratio=None if ratio is None else ratio[part],
            ref_per_token_logps=old_logp - 0.2,
            num_items_in_batch=batch.mask.sum().double() * updates))
        total = total + loss
    return total


def vllm_ratio(config, mask):
    """importance_sampling_ratio as GRPOTrainer._generate_and_score_completions makes it."""
    log_ratio = gap() * mask                                                        # [B, T]
    if config.vllm_importance_sampling_mode == "sequence_truncate":
        log_ratio = log_ratio.sum(-1, keepdim=True)                                 # [B, 1]
    return log_ratio.exp().clamp(max=config.vllm_importance_sampling_clip_max)


OWN = ["grpo", "dr_grpo", "dapo --overlong_cache 0 --dynamic_sampling false", "gspo", "luspo",
       "cispo", "sapo", "vespo", "grpo --epsilon_high 0.27", "grpo --dual_clip 1.5",
       "cispo --epsilon_high 4"]                 # GSPO's baseline; ScaleRL's cap of 5
ADDED = ["", "--off_policy_mask 0.001", "--beta 0.3 --micro_batch_size 4", "--entropy_coef 0.05"]
BY_HAND = dict(use_vllm=True, vllm_importance_sampling_correction=True,
               vllm_importance_sampling_clip_max=2.0)        # what export.py does not translate
CASES = [(own, more, {}) for own in OWN for more in ADDED]
CASES += [(name, f"--mismatch {ours}_truncate",
           BY_HAND | dict(vllm_importance_sampling_mode=f"{theirs}_truncate"))
          for name, ours, theirs in (("grpo", "token", "token"), ("cispo", "token", "token"),
                                     ("gspo", "seq", "sequence"))]


def configured(line, folder, **more):
    """(our settings, TRL's) of a command line, TRL's with `more` fields."""
    settings = parse(f"--algorithm {line} {SIZES}".split())
    config, missing = translate(settings)
    assert not missing or more
    return settings, GRPOConfig(**config | more, output_dir=str(folder), use_cpu=True)


@pytest.mark.parametrize("own, added, more", CASES)
def test_a_printed_config_is_the_same_loss(own, added, more, tmp_path, task_once):
    """Value and every gradient of a mini-batch, some in micro-batches."""
    settings, config = configured(f"{own} {added}", tmp_path, **more)
    batch = mini_batch(empty=(3, 8))             # as --mask_truncated_completions makes them
    assert_same(our_loss(settings, batch), trl_loss(config, batch), batch)


def test_gmpo_is_trls(tmp_path, task_once):
    _, config = configured("grpo --epsilon 0.4", tmp_path, epsilon_high=None)
    settings, batch = parse(f"--algorithm gmpo {SIZES}".split()), mini_batch()
    assert_same(our_loss(settings, batch), trl_loss(config, batch, GMPOTrainer), batch)


def test_the_top_fifth_by_entropy_is_trls():
    entropy = torch.rand(B, T, generator=torch.Generator().manual_seed(3))
    mask = mini_batch().mask
    theirs = GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=SINGLE), entropy,
                                               mask.long(), 0.8)
    assert high_entropy_mask(entropy, mask, 0.8).equal(theirs & mask)
