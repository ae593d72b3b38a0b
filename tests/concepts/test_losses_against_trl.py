"""losses.py against TRL 1.16's own loss code, called on the same tensors, and the settings that
tools/export.py prints for it. python -m pytest tests/concepts/test_losses_against_trl.py

`GRPOTrainer._compute_loss` and `GMPOTrainer._compute_loss` run unchanged on a stand-in for `self`,
made of a GRPOConfig and a forward pass that returns our log-probs. TRL has no reinforce,
dapo_paper, gspo_token, rspo or sequence_is here.
"""

import ast
import os
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import reference
from losses import high_entropy_mask, kl_penalty, token_weights
from features.mismatch import mismatch_correction
from plumbing.run.arguments import ALGORITHMS, parse
from reference import L_MAX
from test_losses import ours

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16", reason="trl is missing: pip install trl==1.16.0 to "
                                                     "compare with its losses")
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from tools import export  # noqa: E402
from trl import GRPOConfig  # noqa: E402

BATCH = reference.only(slice(0, 12), reference.ragged(absurd=[0.0]))    # TRL needs finite padding
B, T = BATCH.mask.shape
BATCH.A[~BATCH.mask.any(-1)] = 0                             # GMPOTrainer adds A for an empty row
COMPLETION = BATCH.mask.flip(-1).cumsum(-1).flip(-1) > 0                # with what a tool said

SAME = {  # our objective and its options, TRL's GRPOConfig
    "grpo": ("grpo", {}, dict(loss_type="grpo")),
    "GSPO's baseline": ("grpo", dict(epsilon_high=0.27),
                        dict(loss_type="grpo", epsilon_high=0.27)),
    "dual clip": ("grpo", dict(dual_clip=1.5), dict(loss_type="grpo", delta=1.5)),
    "ppo": ("ppo", {}, dict(loss_type="grpo")),
    "dr_grpo": ("dr_grpo", {}, dict(loss_type="dr_grpo")),
    "dapo": ("dapo", {}, dict(loss_type="dapo", epsilon_high=0.28)),
    "gspo": ("gspo", {}, dict(loss_type="grpo", importance_sampling_level="sequence",
                              epsilon=3e-4, epsilon_high=4e-4)),
    "luspo": ("luspo", {}, dict(loss_type="luspo", importance_sampling_level="sequence",
                                epsilon=2e-3, epsilon_high=2.5e-3)),
    "cispo": ("cispo", {}, dict(loss_type="cispo", epsilon_high=1.28)),  # TRL's is the cap itself
    "ScaleRL's cap of 5": ("cispo", dict(epsilon_high=4.0),
                           dict(loss_type="cispo", epsilon_high=5.0)),
    "sapo": ("sapo", {}, dict(loss_type="sapo")),
    "vespo": ("vespo", {}, dict(loss_type="vespo")),
    "gmpo": ("gmpo", {}, dict(loss_type="grpo", epsilon=0.4)),
}


def trl_loss(config, logp, *, batch=BATCH, completion=COMPLETION, ratio=None, ref_logp=None,
             entropy=None, trainer_class=GRPOTrainer):
    """(the loss of a mini-batch by TRL's own code, its metrics): the sum over micro-batches, as
    Trainer accumulates their gradients."""
    single = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                             pad_across_processes=lambda x, dim, pad_index: x,
                             gather_for_metrics=lambda x: x, sync_gradients=True)
    size, accumulated = config.per_device_train_batch_size, config.gradient_accumulation_steps
    assert size * accumulated == B
    updates = config.steps_per_generation // accumulated     # of a rollout batch
    entropy = torch.zeros(B, T) if entropy is None else entropy
    ids = torch.zeros(size, T, dtype=torch.long)
    total = 0.0
    for start in range(0, B, size):
        part = slice(start, start + size)
        trainer = SimpleNamespace(
            **{name: getattr(config, name) for name in (
                "loss_type", "importance_sampling_level", "beta", "max_completion_length",
                "top_entropy_quantile", "use_vllm", "vllm_importance_sampling_correction",
                "off_policy_mask_threshold", "entropy_coef")},
            args=config, accelerator=single, epsilon_low=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            aux_loss_enabled=bool(config.router_aux_loss_coef), use_adaptive_entropy=False,
            _entropy_bonus_enabled=config.entropy_coef != 0,
            model=SimpleNamespace(training=True), current_gradient_accumulation_steps=accumulated,
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp[part], entropy[part], None),
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            get_high_entropy_mask=lambda *inputs: GRPOTrainer.get_high_entropy_mask(
                SimpleNamespace(accelerator=single), *inputs),
            _metrics=defaultdict(lambda: defaultdict(list)))
        rows = [None if x is None else x[part] for x in (ratio, ref_logp)]
        total = total + trainer_class._compute_loss(trainer, None, dict(
            prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids,
            advantages=batch.A[part], completion_mask=completion[part].long(),
            tool_mask=(batch.mask | ~completion)[part].long(),
            old_per_token_logps=batch.old_logp[part], importance_sampling_ratio=rows[0],
            ref_per_token_logps=rows[1], num_items_in_batch=batch.mask.sum().double() * updates))
    return total, trainer._metrics["train"]


@pytest.fixture
def theirs(tmp_path):
    """theirs("gspo", beta=0.3, …): loss, gradient and metrics of TRL under this GRPOConfig."""
    def run(case, inputs={}, **options):
        name, _, config = SAME[case]
        logp = BATCH.logp.clone().requires_grad_()
        whole = dict(output_dir=str(tmp_path), use_cpu=True, max_completion_length=L_MAX,
                     per_device_train_batch_size=B, num_generations=4, use_vllm=False,
                     sapo_temperature_neg=1.05, use_bias_correction_kl=False)
        loss, metrics = trl_loss(
            GRPOConfig(**whole | dict(epsilon=0.2) | config | options), logp, **inputs,
            trainer_class=GMPOTrainer if name == "gmpo" else GRPOTrainer)
        return loss.item(), torch.autograd.grad(loss, logp)[0], metrics
    return run


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-8)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-10)
    assert (ours[1] != 0).any()


@pytest.mark.parametrize("case", SAME)
def test_value_and_every_gradient_equal_trls(case, theirs):
    name, options, _ = SAME[case]
    assert_same(ours(name, BATCH, **options), theirs(case))


@pytest.mark.parametrize("case", ["grpo", "dapo", "gspo", "cispo"])
def test_mismatch_weights_equal_trls_correction(case, theirs):
    name, options, _ = SAME[case]
    ratio = BATCH.mismatch[:, :1].expand(B, T) if case == "gspo" else BATCH.mismatch
    batch = BATCH._replace(mismatch=ratio.contiguous())
    weighted = ours(name, batch, mismatch=True, **options)
    assert_same(weighted, theirs(case, dict(ratio=ratio), use_vllm=True,
                                 vllm_importance_sampling_correction=True))


@pytest.mark.parametrize("estimator", ["k3", "k3_is"])
def test_the_kl_term_equals_trls(estimator, theirs):
    """k3_is is TRL's default (use_bias_correction_kl)."""
    mask, old_logp = BATCH.mask, BATCH.old_logp
    ref_logp = old_logp - 0.2
    logp = BATCH.logp.clone().requires_grad_()
    kl = kl_penalty(logp, ref_logp, mask, estimator, old_logp if estimator == "k3_is" else None)
    term = 0.3 * (token_weights(mask, "sequence-mean") * kl).sum()
    loss, gradient, _ = ours("grpo", BATCH)
    both = loss + term.item(), gradient + torch.autograd.grad(term, logp)[0]
    assert_same(both, theirs("grpo", dict(ref_logp=ref_logp), beta=0.3,
                             use_bias_correction_kl=estimator == "k3_is"))


@pytest.mark.parametrize("case", [case for case in SAME if case != "gmpo"])
def test_the_off_policy_mask_equals_trls(case, theirs):
    name, options, _ = SAME[case]
    masked = theirs(case, off_policy_mask_threshold=1e-3)
    assert_same(ours(name, BATCH, off_policy_mask=1e-3, **options), masked)
    assert masked[0] != pytest.approx(theirs(case)[0], rel=1e-6)


@pytest.mark.parametrize("case", ["grpo", "dapo", "gspo", "cispo", "sapo"])
def test_the_top_fifth_by_entropy_equals_trls(case, theirs):
    name, options, _ = SAME[case]
    entropy = torch.rand(B, T, generator=torch.Generator().manual_seed(3))
    top = high_entropy_mask(entropy, BATCH.mask, 0.8)
    got = ours(name, BATCH._replace(mismatch=top.double()), mismatch=True, **options)
    assert_same(got, theirs(case, dict(entropy=entropy), top_entropy_quantile=0.2))


def test_clip_shares_equal_trls_over_tokens_and_are_not_comparable_for_gspo(theirs):
    stats, (*_, metrics) = ours("grpo", BATCH).stats, theirs("grpo")
    assert stats["clip_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0], rel=1e-6)
    assert stats["clip_high"] == pytest.approx(metrics["clip_ratio/high_mean"][0], rel=1e-6)
    share = theirs("gspo")[2]["clip_ratio/low_mean"][0]      # of sequences there, in the paper
    below = reference.objective("gspo", BATCH)[2]            # of tokens
    assert share * B == pytest.approx(len({row for row, _ in below}))
    assert ours("gspo", BATCH).stats["clip_low"] != pytest.approx(share, rel=0.05)


def test_gspo_with_trls_default_loss_type_is_another_objective(theirs):
    """loss_type="dapo" is TRL's default: with sequence ratios it weights responses by their length,
    which GSPO does not."""
    other = theirs("gspo", loss_type="dapo")
    assert ours("gspo", BATCH).loss != pytest.approx(other[0], rel=1e-2)
    assert ours("gspo", BATCH, reduction="token-mean").loss == pytest.approx(other[0], rel=1e-6)


# ------------------------------------------------------------------ python tools/export.py trl

DRAWN = {"algorithm": [*ALGORITHMS], "reduction": ["sequence-mean", "token-mean", "sequence-sum"],
         "epsilon": ["0.1"], "epsilon_high": ["0.15"], "dual_clip": ["1.2", "3"], "beta": ["0.3"],
         "kl_estimator": ["k2", "k3_is"], "entropy_coef": ["0.05"], "off_policy_mask": ["0.05"],
         "mismatch": ["token_truncate", "seq_truncate", "geo_truncate"], "mismatch_high": ["6"],
         "mismatch_mask": ["token", "seq"], "router_aux_loss_coef": ["0.1"],
         "overlong_cache": ["0"], "dynamic_sampling": ["false"], "old_logp": ["sampler"],
         "mask_truncated_completions": ["true"], "micro_batch_size": ["4", "6"]}


def exported(capsys, *flags):
    """What the command line prints."""
    export.main(["trl", *flags])
    return capsys.readouterr().out


def printed_config(text):
    """The arguments of the trl.GRPOConfig that is printed."""
    call = ast.parse(text).body[0].value
    assert ast.unparse(call.func) == "trl.GRPOConfig"
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}


def vllm_ratio(config, gap, mask):
    """importance_sampling_ratio as GRPOTrainer._generate_and_score_completions makes it."""
    level, action = config.vllm_importance_sampling_mode.split("_")
    ratio = ((gap * mask).sum(-1, keepdim=True) if level == "sequence" else gap * mask).exp()
    low = config.vllm_importance_sampling_clip_min
    high = config.vllm_importance_sampling_clip_max
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def same_or_not(args, config):
    """(our, TRL's) value and gradient of a mini-batch with two rows that have no loss token, as
    --mask_truncated_completions makes them."""
    completion = COMPLETION.clone()
    completion[torch.tensor([3, 8])] = False
    batch = BATCH._replace(mask=BATCH.mask & completion)
    mask, old_logp = batch.mask, batch.old_logp
    gap = 0.3 * torch.randn(B, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rollout = SimpleNamespace(mask=mask, sampler_logp=old_logp - gap)
    mismatch = mismatch_correction(args, old_logp, rollout)
    got = ours(args.objective, batch._replace(mismatch=mismatch), mismatch=mismatch is not None,
               reduction=args.reduction, epsilon=args.epsilon, epsilon_high=args.epsilon_high,
               dual_clip=args.dual_clip, off_policy_mask=args.off_policy_mask)
    logp = batch.logp.clone().requires_grad_()
    ref_logp = old_logp - 0.2
    terms = args.entropy_coef * (token_weights(mask, "token-mean") * 0.3 * logp).sum()
    if args.beta:
        kl = kl_penalty(logp, ref_logp, mask, args.kl_estimator, old_logp)
        terms = terms + args.beta * (token_weights(mask, args.reduction, max_length=L_MAX)
                                     * kl).sum()
    ours_too = got.loss + terms.item(), got.gradient + torch.autograd.grad(terms, logp)[0]
    ratio = vllm_ratio(config, gap, mask) if config.use_vllm else None
    loss, _ = trl_loss(config, logp, batch=batch, completion=completion, ratio=ratio,
                       ref_logp=ref_logp, entropy=-0.3 * logp)
    return ours_too, (loss.item(), torch.autograd.grad(loss, logp)[0])


@pytest.mark.parametrize("seed", range(90))
def test_a_printed_config_is_the_same_loss_or_there_is_one_line_why_not(seed, capsys, tmp_path):
    """Two mini-batches of three groups of four, in micro-batches for some seeds."""
    rng = random.Random(seed)
    while True:
        flags = ["--max_completion_length", str(L_MAX), "--prompts_per_step", "6",
                 "--num_generations", "4", "--steps_per_generation", "2"]
        for name, values in DRAWN.items():
            if name == "algorithm" or rng.random() < 0.2:
                flags += [f"--{name}", *rng.choice(values).split()]
        try:
            args = parse(flags)
            break
        except ValueError:
            pass
    text = exported(capsys, *flags)
    if text.startswith("# no equivalent"):
        assert text.count("\n") == 1
        return
    config = GRPOConfig(**printed_config(text) | {"output_dir": str(tmp_path), "use_cpu": True})
    ours, theirs = same_or_not(args, config)
    if "# entropy bonus: TRL takes the mean over the tokens of each micro-batch" in text:
        assert (ours[1] - theirs[1]).abs().max() > 1e-5
        return
    assert_same(ours, theirs)


@pytest.mark.parametrize("micro, differs", [("12", False), ("4", True)])
def test_an_entropy_bonus_in_micro_batches_is_said_to_be_another_mean(micro, differs, capsys,
                                                                      tmp_path):
    flags = ("--entropy_coef 0.05 --prompts_per_step 6 --num_generations 4 "
             f"--steps_per_generation 2 --max_completion_length {L_MAX} "
             f"--micro_batch_size {micro}").split()
    text = exported(capsys, *flags)
    assert ("# entropy bonus: TRL takes the mean over the tokens" in text) == differs
    config = GRPOConfig(**printed_config(text) | {"output_dir": str(tmp_path), "use_cpu": True})
    ours, theirs = same_or_not(parse(flags), config)
    assert torch.allclose(ours[1], theirs[1], atol=1e-10) != differs


# -------------------------------------------------------- what else a printed config must say

# flag: values drawn; the field of GRPOConfig that says it, and what it must be. No field: NAMED has
# its text, or a comment names the flag.
SAYS = {
    "reward_weights": (["0.5"], "reward_weights", lambda args: args.reward_weights),
    "num_generations": (["4"], "num_generations", lambda args: 4),
    "temperature": (["0.7"], "temperature", lambda args: 0.7),
    "learning_rate": (["0.01"], "learning_rate", lambda args: 0.01),
    "seed": (["7"], "seed", lambda args: 7),
    "lr_scheduler_type": (["linear", "constant_with_warmup"], "lr_scheduler_type",
                          lambda args: args.lr_scheduler_type),
    "warmup_steps": (["0", "3"], "warmup_steps", lambda args: args.warmup_steps),
    "max_grad_norm": (["0", "0.5"], "max_grad_norm", lambda args: args.max_grad_norm),
    "weight_decay": (["0.1"], "weight_decay", lambda args: 0.1),
    "steps": (["9"], "max_steps", lambda args: 9 * args.steps_per_generation),
    "prompts_per_step": (["16"], "generation_batch_size", lambda args: 16 * args.num_generations),
    "steps_per_generation": (["2"], "logging_steps", lambda args: 2),
    "micro_batch_size": (["4"], "per_device_train_batch_size", lambda args: 4),
    "max_completion_length": (["33"], "max_completion_length", lambda args: 33),
    "optim": (["adamw_torch", "adamw_8bit"], "optim", lambda args: args.optim),
    "bf16": (["true"], "bf16", lambda args: True),
    "gradient_checkpointing": (["true"], "gradient_checkpointing", lambda args: True),
    "scale_rewards": (["batch", "none"], "scale_rewards", lambda args: args.scale_rewards),
    "output_dir": (["there"], "output_dir", lambda args: "there"),
    "report_to": (["tensorboard"], "report_to", lambda args: ["tensorboard"]),
    "save_steps": (["2"], "save_steps", lambda args: 2 * args.steps_per_generation)}
SAYS |= {flag: (values, None, None) for flag, values in {
    "stop": ["a b", "\\n"], "use_peft": ["true"],
    "plain": ["true"],
    "max_prompt_length": ["99"], "verifier": ["exact", "math"], "chat_template": ["false"],
    "columns": ["a b"], "eval_steps": ["3"], "system_prompt": ["Think."]}.items()}
NAMED = {"use_peft": "peft_config=LoraConfig(", "lora_r": "r=3,", "lora_alpha": "lora_alpha=5",
         "stop": "stop strings", "lora_target_modules": "target_modules=['q_proj']"}


@pytest.mark.parametrize("seed", range(40))
def test_everything_that_differs_from_trls_default_is_printed_or_named(seed, capsys, tmp_path):
    rng = random.Random(seed)
    while True:
        given = {flag: rng.choice(values) for flag, (values, *_) in SAYS.items()
                 if rng.random() < 0.25}
        if "use_peft" in given and rng.random() < 0.7:
            given |= {"lora_r": "3", "lora_alpha": "5", "lora_target_modules": "q_proj"}
        flags = ["--model_name_or_path", "some/model", "--dataset_name", "rows.jsonl"]
        for flag, value in given.items():
            flags += [f"--{flag}", *value.split(" ")]
        try:
            args = parse(flags)
            break
        except ValueError:
            pass
    text = exported(capsys, *flags)
    printed = printed_config(text)
    output_dir = printed.pop("output_dir")
    config = GRPOConfig(**printed | {"use_cpu": True}, output_dir=str(tmp_path))
    config.output_dir = output_dir
    comments = "\n".join(line for line in text.splitlines() if line.strip().startswith("#"))
    assert "--model_name_or_path some/model --dataset_name rows.jsonl" in comments
    for flag in given:
        _, field, wanted = SAYS.get(flag, (None, None, None))
        if field:
            assert getattr(config, field) == wanted(args), flag
        elif flag in NAMED:
            assert NAMED[flag] in text, (flag, text)
        else:
            assert f"--{flag} " in comments.replace("\n", " \n") + " ", (flag, comments)
