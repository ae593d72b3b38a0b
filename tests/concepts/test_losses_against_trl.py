"""losses.py against TRL 1.16's own loss code, called on the same tensors. python -m pytest tests/concepts/test_losses_against_trl.py

`GRPOTrainer._compute_loss` and `GMPOTrainer._compute_loss` run unchanged on a stand-in for `self` that holds what they read: the
options, and a forward pass that returns our log-probs. TRL has no reinforce, dapo_paper, gspo_token, rspo or sequence_is here.
"""

import ast
import os
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from losses import high_entropy_mask, kl_penalty, policy_loss, token_weights
from plumbing.run.arguments import ALGORITHMS, parse
from plumbing.loop.extras import mismatch_correction

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl", minversion="1.16", reason="trl is missing: pip install trl==1.16.0 to compare with its losses")
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from tools import export  # noqa: E402
from trl import GRPOConfig  # noqa: E402

B, T, L_MAX = 12, 14, 20

# our objective and its options: TRL's loss_type, importance_sampling_level and options
SAME = {
    "grpo": ("grpo", {}, "grpo", "token", dict(epsilon=0.2, epsilon_high=0.2)),
    "grpo as GSPO's baseline": ("grpo", dict(epsilon_high=0.27), "grpo", "token", dict(epsilon=0.2, epsilon_high=0.27)),
    "grpo with dual clip": ("grpo", dict(dual_clip=1.5), "grpo", "token", dict(epsilon=0.2, epsilon_high=0.2, delta=1.5)),
    "ppo": ("ppo", {}, "grpo", "token", dict(epsilon=0.2, epsilon_high=0.2)),
    "dr_grpo": ("dr_grpo", dict(max_length=L_MAX), "dr_grpo", "token", dict(epsilon=0.2, epsilon_high=0.2)),
    "dapo": ("dapo", {}, "dapo", "token", dict(epsilon=0.2, epsilon_high=0.28)),
    "gspo": ("gspo", {}, "grpo", "sequence", dict(epsilon=3e-4, epsilon_high=4e-4)),
    "luspo": ("luspo", {}, "luspo", "sequence", dict(epsilon=2e-3, epsilon_high=2.5e-3)),
    "cispo": ("cispo", {}, "cispo", "token", dict(epsilon=0.2, epsilon_high=1.28)),            # TRL's is the absolute cap
    "cispo, ScaleRL's cap of 5": ("cispo", dict(epsilon_high=4.0), "cispo", "token", dict(epsilon=0.2, epsilon_high=5.0)),
    "sapo": ("sapo", {}, "sapo", "token", dict(epsilon=0.2, epsilon_high=0.2)),
    "vespo": ("vespo", {}, "vespo", "token", dict(epsilon=0.2, epsilon_high=0.2)),
    "gmpo": ("gmpo", {}, "gmpo", "token", dict(epsilon=0.4, epsilon_high=0.4)),
}


def make_batch():
    """Ragged rows, tool output in two of them, log s from far below GSPO's band to far above; finite padding, which TRL needs."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    completion = torch.arange(T) < torch.tensor([14, 3, 9, 12, 1, 7, 14, 5, 8, 11, 2, 6])[:, None]
    tool = torch.ones(B, T, dtype=torch.bool)
    tool[2, 3:6] = tool[6, 0:4] = False
    mask = completion & tool
    log_w = 0.3 * draw(B, T)
    targets = torch.tensor([0.3, -0.3, 2e-3, -2e-3, 1e-4, -1e-4] * 2, dtype=torch.float64)
    log_w = log_w - ((log_w * mask).sum(-1) / mask.sum(-1) - targets)[:, None]
    old_logp = -0.1 - 3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    sign = torch.tensor([1, 1, 1, 1, 1, 0, -1, -1, -1, -1, -1, -1])            # each log s with both signs
    return old_logp + log_w, old_logp, sign * (0.2 + draw(B).abs()), completion, tool


def trl_loss(loss_type, level, options, logp, old_logp, A, completion, tool, mismatch=None, ref_logp=None, beta=0.0, is_kl=False,
             off_policy=None, entropy=None):
    """The loss of TRL's own code, in eval mode: a whole batch, no accumulation."""
    single = SimpleNamespace(num_processes=1, pad_across_processes=lambda x, dim, pad_index: x, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x)
    args = SimpleNamespace(delta=options.get("delta"), use_bias_correction_kl=is_kl, steps_per_generation=1,
                           sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                           vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros(B, T) if entropy is None else entropy, None),
        args=args, accelerator=single, get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_high_entropy_mask=lambda *a: GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=single), *a),
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon_high"], beta=beta, max_completion_length=L_MAX, aux_loss_enabled=False,
        top_entropy_quantile=1.0 if entropy is None else 0.2, off_policy_mask_threshold=off_policy,
        use_vllm=mismatch is not None, vllm_importance_sampling_correction=mismatch is not None, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=False), current_gradient_accumulation_steps=1,
        get_gamma_weights=GRPOTrainer.get_gamma_weights, _metrics=defaultdict(lambda: defaultdict(list)))
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids, completion_mask=completion.long(),
                  tool_mask=tool.long(), advantages=A, old_per_token_logps=old_logp, importance_sampling_ratio=mismatch,
                  ref_per_token_logps=ref_logp, num_items_in_batch=(completion & tool).sum().double())
    trainer_class = GMPOTrainer if loss_type == "gmpo" else GRPOTrainer
    return trainer_class._compute_loss(trainer, None, inputs), trainer._metrics["eval"]


def value_and_gradient(loss, x):
    return loss.item(), torch.autograd.grad(loss, x)[0]


def assert_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6, abs=1e-8)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=1e-10)
    assert (ours[1] != 0).any()


@pytest.mark.parametrize("case", SAME)
def test_value_and_every_gradient_equal_trls(case):
    name, ours, loss_type, level, theirs = SAME[case]
    logp, old_logp, A, completion, tool = make_batch()
    logp.requires_grad_()
    loss, _ = policy_loss(name, logp, old_logp, A, completion & tool, **ours)
    other, _ = trl_loss(loss_type, level, theirs, logp, old_logp, A, completion, tool)
    assert_same(value_and_gradient(loss, logp), value_and_gradient(other, logp))


@pytest.mark.parametrize("case", ["grpo", "dapo", "gspo", "cispo"])
def test_mismatch_weights_equal_trls_correction(case):
    name, ours, loss_type, level, theirs = SAME[case]
    logp, old_logp, A, completion, tool = make_batch()
    mismatch = torch.rand(B, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    if level == "sequence":
        mismatch = mismatch[:, :1].expand(B, T)
    logp.requires_grad_()
    loss, _ = policy_loss(name, logp, old_logp, A, completion & tool, mismatch=mismatch.contiguous(), **ours)
    other, _ = trl_loss(loss_type, level, theirs, logp, old_logp, A, completion, tool, mismatch=mismatch)
    assert_same(value_and_gradient(loss, logp), value_and_gradient(other, logp))


@pytest.mark.parametrize("estimator", ["k3", "k3_is"])
def test_the_kl_term_equals_trls(estimator):
    """k3_is is TRL's default (use_bias_correction_kl)."""
    logp, old_logp, A, completion, tool = make_batch()
    mask, ref_logp = completion & tool, old_logp - 0.2
    logp.requires_grad_()
    kl = kl_penalty(logp, ref_logp, mask, estimator, old_logp=old_logp if estimator == "k3_is" else None)
    loss = policy_loss("grpo", logp, old_logp, A, mask)[0] + 0.3 * (token_weights(mask, "sequence-mean") * kl).sum()
    other, _ = trl_loss("grpo", "token", SAME["grpo"][4], logp, old_logp, A, completion, tool, ref_logp=ref_logp, beta=0.3,
                        is_kl=estimator == "k3_is")
    assert_same(value_and_gradient(loss, logp), value_and_gradient(other, logp))


@pytest.mark.parametrize("case", [case for case in SAME if case != "gmpo"])
def test_the_off_policy_mask_equals_trls(case):
    name, ours, loss_type, level, theirs = SAME[case]
    logp, old_logp, A, completion, tool = make_batch()
    logp.requires_grad_()
    loss, _ = policy_loss(name, logp, old_logp, A, completion & tool, off_policy_mask=1e-3, **ours)
    other, _ = trl_loss(loss_type, level, theirs, logp, old_logp, A, completion, tool, off_policy=1e-3)
    plain, _ = trl_loss(loss_type, level, theirs, logp, old_logp, A, completion, tool)
    assert_same(value_and_gradient(loss, logp), value_and_gradient(other, logp))
    assert other.item() != pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("case", ["grpo", "dapo", "gspo", "cispo", "sapo"])
def test_the_top_fifth_by_entropy_equals_trls(case):
    name, ours, loss_type, level, theirs = SAME[case]
    logp, old_logp, A, completion, tool = make_batch()
    entropy = torch.rand(B, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logp.requires_grad_()
    top = high_entropy_mask(entropy.float(), completion & tool, 0.8)
    loss, _ = policy_loss(name, logp, old_logp, A, completion & tool, mismatch=top.double(), **ours)
    other, _ = trl_loss(loss_type, level, theirs, logp, old_logp, A, completion, tool, entropy=entropy.float())
    assert_same(value_and_gradient(loss, logp), value_and_gradient(other, logp))


def test_clip_shares_equal_trls_over_tokens_and_are_not_comparable_for_gspo():
    logp, old_logp, A, completion, tool = make_batch()
    stats = policy_loss("grpo", logp, old_logp, A, completion & tool)[1]
    metrics = trl_loss("grpo", "token", SAME["grpo"][4], logp, old_logp, A, completion, tool)[1]
    for ours, theirs in (("clip_low", "clip_ratio/low_mean"), ("clip_high", "clip_ratio/high_mean")):
        assert stats[ours].item() == pytest.approx(metrics[theirs][0], rel=1e-6)
    stats = policy_loss("gspo", logp, old_logp, A, completion & tool)[1]
    metrics = trl_loss("grpo", "sequence", SAME["gspo"][4], logp, old_logp, A, completion, tool)[1]
    sequences = metrics["clip_ratio/low_mean"][0]                              # TRL counts sequences there, the paper tokens
    assert sequences * B == pytest.approx(2) and stats["clip_low"].item() != pytest.approx(sequences, rel=0.1)


def test_gspo_with_trls_default_loss_type_is_another_objective():
    """loss_type="dapo" is TRL's default: with sequence ratios it weights answers by their length, which GSPO does not."""
    logp, old_logp, A, completion, tool = make_batch()
    ours = policy_loss("gspo", logp, old_logp, A, completion & tool)[0]
    theirs, _ = trl_loss("dapo", "sequence", SAME["gspo"][4], logp, old_logp, A, completion, tool)
    assert ours.item() != pytest.approx(theirs.item(), rel=1e-2)
    weights = token_weights(completion & tool, "token-mean")
    reweighted, _ = policy_loss("gspo", logp, old_logp, A, completion & tool, weights=weights)
    assert reweighted.item() == pytest.approx(theirs.item(), rel=1e-6)


# ------------------------------------------------------------------------- python tools/export.py trl

DRAWN = {"algorithm": [*ALGORITHMS], "reduction": ["sequence-mean", "token-mean", "sequence-sum"],
         "objective_constants": ["tau_negative=1.3", "k_negative=2.5 lambda_positive=2"],
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


def trl_loss_of(config, logp, old_logp, ref_logp, gap, A, completion, tool):
    """The loss of a mini-batch by TRL's own code under a whole GRPOConfig: the sum over its
    micro-batches, as Trainer accumulates their gradients."""
    single = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                             gather_for_metrics=lambda x: x, sync_gradients=True)
    size = config.per_device_train_batch_size
    accumulated = config.gradient_accumulation_steps
    assert size * accumulated == B
    mask = completion & tool
    updates = config.steps_per_generation // accumulated     # of a rollout batch
    ratio = vllm_ratio(config, gap, mask) if config.use_vllm else None
    losses = []
    for start in range(0, B, size):
        part = slice(start, start + size)
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (logp[part], -0.3 * logp[part], None),
            args=config, accelerator=single, loss_type=config.loss_type, epsilon_low=config.epsilon,
            importance_sampling_level=config.importance_sampling_level, beta=config.beta,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            max_completion_length=config.max_completion_length, top_entropy_quantile=1.0,
            aux_loss_enabled=bool(config.router_aux_loss_coef), use_vllm=config.use_vllm,
            off_policy_mask_threshold=config.off_policy_mask_threshold,
            vllm_importance_sampling_correction=config.vllm_importance_sampling_correction,
            _entropy_bonus_enabled=config.entropy_coef != 0, entropy_coef=config.entropy_coef,
            use_adaptive_entropy=False, model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=accumulated,
            get_gamma_weights=GRPOTrainer.get_gamma_weights,
            get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
            _metrics=defaultdict(lambda: defaultdict(list)))
        ids = torch.zeros(size, T, dtype=torch.long)
        losses.append(GRPOTrainer._compute_loss(trainer, None, dict(
            prompt_ids=ids[:, :1], prompt_mask=ids[:, :1], completion_ids=ids,
            advantages=A[part], completion_mask=completion[part].long(),
            tool_mask=tool[part].long(), old_per_token_logps=old_logp[part],
            importance_sampling_ratio=None if ratio is None else ratio[part],
            ref_per_token_logps=ref_logp[part],
            num_items_in_batch=mask.sum().double() * updates)))
    return sum(losses)


def same_or_not(args, config):
    """(our, TRL's) value and gradient of a mini-batch with two rows that have no loss token, as
    --mask_truncated_completions makes them."""
    logp, old_logp, A, completion, tool = make_batch()
    completion[torch.tensor([3, 8])] = False
    mask = completion & tool
    ref_logp = old_logp - 0.2
    gap = 0.3 * torch.randn(B, T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logp.requires_grad_()
    rollout = SimpleNamespace(mask=mask, sampler_logp=old_logp - gap)
    weights = token_weights(mask, args.reduction, max_length=L_MAX)
    ours, _ = policy_loss(
        args.objective, logp, old_logp, A, mask, epsilon=args.epsilon,
        epsilon_high=args.epsilon_high, weights=weights, dual_clip=args.dual_clip,
        mismatch=mismatch_correction(args, old_logp, rollout),
        off_policy_mask=args.off_policy_mask, constants=args.constants)
    if args.beta:
        kl = kl_penalty(logp, ref_logp, mask, args.kl_estimator, old_logp)
        ours = ours + args.beta * (weights * kl).sum()
    bonus = (token_weights(mask, "token-mean") * -0.3 * logp).sum()
    ours = ours - args.entropy_coef * bonus
    theirs = trl_loss_of(config, logp, old_logp, ref_logp, gap, A, completion, tool)
    return value_and_gradient(ours, logp), value_and_gradient(theirs, logp)


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
def test_an_entropy_bonus_in_micro_batches_is_said_to_be_another_mean(micro, differs, capsys, tmp_path):
    flags = ("--entropy_coef 0.05 --prompts_per_step 6 --num_generations 4 --steps_per_generation 2 "
             f"--max_completion_length {L_MAX} --micro_batch_size {micro}").split()
    text = exported(capsys, *flags)
    assert ("# entropy bonus: TRL takes the mean over the tokens" in text) == differs
    config = GRPOConfig(**printed_config(text) | {"output_dir": str(tmp_path), "use_cpu": True})
    ours, theirs = same_or_not(parse(flags), config)
    assert torch.allclose(ours[1], theirs[1], atol=1e-10) != differs


# ------------------------------------------------------------------ what else a printed config must say

# flag: values drawn; the field of GRPOConfig that says it, and what it must be. None: NAMED has its text, or a comment names the flag.
SAYS = {
    "reward_weights": (["0.5"], "reward_weights", lambda args: args.reward_weights),
    "num_generations": (["4"], "num_generations", lambda args: 4), "temperature": (["0.7"], "temperature", lambda args: 0.7),
    "learning_rate": (["0.01"], "learning_rate", lambda args: 0.01), "seed": (["7"], "seed", lambda args: 7),
    "lr_scheduler_type": (["linear", "constant_with_warmup"], "lr_scheduler_type", lambda args: args.lr_scheduler_type),
    "warmup_steps": (["0", "3"], "warmup_steps", lambda args: args.warmup_steps),
    "max_grad_norm": (["0", "0.5"], "max_grad_norm", lambda args: args.max_grad_norm),
    "weight_decay": (["0.1"], "weight_decay", lambda args: 0.1),
    "steps": (["9"], "max_steps", lambda args: 9 * args.steps_per_generation),
    "prompts_per_step": (["16"], "generation_batch_size", lambda args: 16 * args.num_generations),
    "steps_per_generation": (["2"], "logging_steps", lambda args: 2),
    "micro_batch_size": (["4"], "per_device_train_batch_size", lambda args: 4),
    "max_completion_length": (["33"], "max_completion_length", lambda args: 33), "bf16": (["true"], "bf16", lambda args: True),
    "gradient_checkpointing": (["true"], "gradient_checkpointing", lambda args: True),
    "scale_rewards": (["batch", "none"], "scale_rewards", lambda args: args.scale_rewards),
    "output_dir": (["there"], "output_dir", lambda args: "there"), "report_to": (["tensorboard"], "report_to", lambda args: ["tensorboard"]),
    "save_steps": (["2"], "save_steps", lambda args: 2 * args.steps_per_generation),
    "stop": (["a b", "\\n"], None, None), "use_peft": (["true"], None, None), "merge": (["true"], None, None),
    "optimizer_offload": (["true"], None, None), "plain": (["true"], None, None),
    "max_prompt_length": (["99"], None, None), "verifier": (["exact", "math"], None, None), "chat_template": (["false"], None, None),
    "columns": (["a b"], None, None), "eval_steps": (["3"], None, None), "system_prompt": (["Think."], None, None)}
NAMED = {"use_peft": "peft_config=LoraConfig(", "lora_r": "r=3,", "lora_alpha": "lora_alpha=5", "stop": "stop strings",
         "lora_target_modules": "target_modules=['q_proj']"}


@pytest.mark.parametrize("seed", range(40))
def test_everything_that_differs_from_trls_default_is_printed_or_named(seed, capsys, tmp_path):
    rng = random.Random(seed)
    while True:
        given = {flag: rng.choice(values) for flag, (values, *_) in SAYS.items() if rng.random() < 0.25}
        if "use_peft" in given and rng.random() < 0.7:
            given |= {"lora_r": "3", "lora_alpha": "5", "lora_target_modules": "q_proj"}
        flags = ["--model_name_or_path", "some/model", "--dataset_name", "rows.jsonl"]
        flags += [word for flag, value in given.items() for word in (f"--{flag}", *value.split(" "))]
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
