"""The settings of a run as overrides for verl 0.9.1, with the command that launches it.

tests/tools/test_verl.py looks up every key in verl's own configuration and compares the losses with
verl's own functions under the printed settings. What differs between the two programs without an
error is printed as a comment.
"""

import re
import shlex

import torch

from losses import OBJECTIVES
from plumbing.data.running_sum import overlong_zone
from plumbing.data.tasks import with_length_limit
from plumbing.loop.extras import kl_in_rewards
from tools.trl import IN_BOTH, only_here, other_flags

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"

LOSS_MODE = {  # (ratio, clip) of a row of losses.OBJECTIVES: verl's loss_mode
    ("none", "none"): "gpg", ("token", "min"): "vanilla", ("sequence", "min"): "gspo",
    ("gspo-token", "min"): "gspo", ("log-token", "log-min"): "geo_mean", ("token", "tv"): "dppo_tv",
    ("token", "kl"): "dppo_kl", ("token", "sigmoid"): "sapo", ("token", "weight"): "cispo",
    ("token", "square"): "dro"}
REDUCTION = {"sequence-mean": "seq-mean-token-mean", "token-mean": "token-mean",
             "sequence-sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
ONE_REDUCTION = ("sapo", "geo_mean")    # these average per response, whatever loss_agg_mode says
ADVANTAGE = {"group": "grpo", "leave_one_out": "rloo", "reinforce_plus_plus": "reinforce_plus_plus",
             "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline"}
KL_TYPE = {"k1": "k1", "k2": "k2", "k3": "low_var_kl", "k3_st": "low_var_kl+"}
SCHEDULE = {"constant_with_warmup": "constant", "cosine": "cosine"}
DTYPES = ("float32", "bfloat16", "float16")
NO_CLIP = 1e9           # verl limits ratios to e^20, so a bound of 1e9 is never reached

EXPRESSED = IN_BOTH | set(                       # by the overrides or by the comments
    "test_dataset_name eval_steps eval_samples use_peft lora_r lora_alpha "
    "lora_target_modules".split())


def loss_mode(args):
    """verl's name for the objective of this run; None if verl does not have it."""
    row = OBJECTIVES[args.objective]
    return LOSS_MODE.get((row.ratio, row.clip))


def missing(args):
    """The settings of this run that change its loss and that verl does not have, as a list."""
    mode = loss_mode(args)
    per_response = OBJECTIVES[args.objective].ratio in ("sequence", "log-token")
    return [name for name, on in (
        (f"objective {args.objective}", mode is None),
        (f"advantage {args.advantage}", args.advantage not in ADVANTAGE),
        (f"advantages divided by the {args.scale_rewards}'s statistic",
         args.advantage == "group" and args.scale_rewards not in ("group", "none")),
        (f"reduction {args.reduction} for {args.objective}", args.reduction not in REDUCTION
         or mode in ONE_REDUCTION and args.reduction != "sequence-mean"),
        (f"dual clip of {args.dual_clip} for {args.objective}",
         args.dual_clip and (mode != "vanilla" or args.dual_clip <= 1)),
        ("responses that were cut off left out of the loss", args.mask_truncated_completions),
        ("moving reference policy", args.sync_ref_model),
        ("off-policy mask", args.off_policy_mask),
        ("quantile of the entropies", args.entropy_quantile),
        ("distillation beside another advantage", args.distillation_coef),
        (f"KL estimator {args.kl_estimator}",
         args.beta and not kl_in_rewards(args) and args.kl_estimator not in KL_TYPE),
        ("entropy bonus over tokens beside a loss that is averaged otherwise",
         args.entropy_coef and args.reduction != "token-mean"),
        ("routes of log-probs that are not computed (replay old)",
         args.routing_replay == "old" and args.old_logp == "sampler"),
        (f"sampler in {args.sampler_dtype}", args.sampler_dtype not in DTYPES),
        (f"schedule {args.lr_scheduler_type}", args.lr_scheduler_type not in SCHEDULE),
        ("mismatch weights of this kind",
         (args.mismatch or args.mismatch_mask) and not correction(args)),
        ("mismatch weights per token for a ratio per response",
         args.mismatch == "token_truncate" and per_response),
        ("mismatch weights for the geometric mean of clipped ratios",
         mode == "geo_mean" and args.mismatch),
        ("mismatch weights beside the sampler's log-probs as old ones",
         args.old_logp == "sampler" and (args.mismatch or args.mismatch_mask)),
    ) if on] + only_here(args)


def correction(args):
    """The overrides for --mismatch and --mismatch_mask; {} if verl has no equivalent.

    verl compares the bounds of rollout_rs with sampler / trainer, the inverse of the ratio here. It
    drops the tokens from the loss mask, so they also leave its KL, its entropy and its averages.
    """
    level, _, _ = (args.mismatch or "").partition("_")
    low, high = args.mismatch_mask_bounds if args.mismatch_mask else (None, None)
    levels = {"token": "token", "seq": "sequence"}
    if args.mismatch_mask and not args.mismatch:
        kind = {"seq": "seq_sum_k1", "geo": "seq_mean_k1"}.get(args.mismatch_mask)
        if kind is None or args.beta or args.entropy_coef or args.reduction == "token-mean":
            return {}
        return {f"{CORRECTION}.rollout_rs": kind,
                f"{CORRECTION}.rollout_rs_threshold": f"{1 / high!r}_{1 / low!r}"}
    if level not in levels or args.mismatch_mask not in (None, level):
        return {}
    if args.mismatch_mask and high > args.mismatch_high:
        return {}
    threshold = f"{low!r}_{high!r}" if args.mismatch_mask else args.mismatch_high
    return {f"{CORRECTION}.rollout_is": levels[level],
            f"{CORRECTION}.rollout_is_threshold": threshold}


def overrides(args):
    """{key: value} for verl's configuration; a key that begins with + is one that verl reads and
    that its configuration does not list."""
    mode = loss_mode(args)
    prompts = args.prompts_per_step // args.steps_per_generation
    clip_c = args.constants.get("cap", args.dual_clip or NO_CLIP)
    megatron = args.routing_replay != "none"
    config = {
        "data.train_files": "train.parquet", "data.val_files": "test.parquet",
        "data.train_batch_size": args.prompts_per_step,
        "data.max_prompt_length": args.max_prompt_length,
        "data.max_response_length": args.max_completion_length,
        "data.seed": args.seed,
        "reward.custom_reward_function.path": "reward.py",
        f"{MODEL}.path": args.model_name_or_path or "CHECKPOINT",
        f"{MODEL}.enable_gradient_checkpointing": args.gradient_checkpointing,

        f"{ACTOR}.policy_loss.loss_mode": mode,
        f"{ACTOR}.loss_agg_mode": REDUCTION[args.reduction],
        f"{ACTOR}.ppo_mini_batch_size": prompts, f"{ACTOR}.ppo_epochs": args.num_iterations,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu":
            args.micro_batch_size or prompts * args.num_generations,
        f"{ACTOR}.entropy_coeff": args.entropy_coef,
        "algorithm.adv_estimator": ADVANTAGE[args.advantage],
        "algorithm.norm_adv_by_std_in_grpo": args.scale_rewards == "group",

        f"{ACTOR}.optim.lr": args.learning_rate, f"{ACTOR}.optim.betas": [0.9, 0.95],
        f"{ACTOR}.optim.weight_decay": args.weight_decay,
        f"{ACTOR}.optim.clip_grad": args.max_grad_norm or NO_CLIP,
        f"{ACTOR}.optim.{'lr_decay_style' if megatron else 'lr_scheduler_type'}":
            SCHEDULE[args.lr_scheduler_type],
        f"{ACTOR}.optim.lr_warmup_steps": -(-args.warmup_steps // args.updates_per_batch),
        f"{ACTOR}.{'megatron' if megatron else 'fsdp_config'}.dtype":
            str(args.half or torch.float32)[6:],

        f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.n": args.num_generations,
        f"{ROLLOUT}.temperature": args.temperature, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1,
        f"{ROLLOUT}.dtype": args.sampler_dtype, f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu":
            args.micro_batch_size or prompts * args.num_generations,
        f"{ROLLOUT}.val_kwargs.n": args.eval_samples or 1,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.temperature": args.temperature,

        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.logger": ["console"],
        "trainer.total_training_steps": args.steps, "trainer.total_epochs": args.steps,
        "trainer.save_freq": args.save_steps or -1, "trainer.test_freq": args.eval_steps or -1,
        "trainer.default_local_dir": args.output_dir or f"runs/verl-{args.algorithm}"}
    if mode in ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl"):
        config |= {f"{ACTOR}.clip_ratio_low": args.epsilon,
                   f"{ACTOR}.clip_ratio_high": args.epsilon_high}
    if mode in ("vanilla", "dppo_tv", "dppo_kl"):
        config[f"{ACTOR}.clip_ratio_c"] = clip_c
    if mode == "sapo":
        config |= {f"{ACTOR}.tau_pos": args.constants["tau_positive"],
                   f"{ACTOR}.tau_neg": args.constants["tau_negative"]}
    if mode == "dro":
        config[f"{ACTOR}.policy_loss.dro_beta"] = args.constants["beta"]
    if args.reduction == "constant":
        config[f"{ACTOR}.loss_scale_factor"] = args.max_completion_length
    return config | rare(args, megatron)


def rare(args, megatron):
    """The overrides of flags that most runs do not set."""
    config = correction(args)
    if args.beta and kl_in_rewards(args):
        config |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl",
                   "algorithm.kl_ctrl.kl_coef": args.beta}
    elif args.beta:
        config |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": args.beta,
                   f"{ACTOR}.kl_loss_type": KL_TYPE[args.kl_estimator]}
    if args.beta:
        config["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = (
            args.micro_batch_size or args.num_generations)
    if args.old_logp == "sampler":
        config[f"{CORRECTION}.bypass_mode"] = True
    if args.dynamic_sampling:
        config |= {"algorithm.filter_groups.enable": True,
                   "algorithm.filter_groups.metric": "reward"}
    if args.overlong_cache:
        cache = "+reward.reward_kwargs.overlong_buffer_cfg"
        limit = args.max_completion_length
        config |= {"reward.reward_manager.name": "dapo",
                   "+reward.reward_kwargs.max_resp_len": limit,
                   f"{cache}.enable": True,
                   f"{cache}.len": overlong_zone(args.overlong_cache, limit),
                   f"{cache}.penalty_factor": 1.0, f"{cache}.log": False}
    if megatron:
        config[f"{ACTOR}.megatron.router_replay.mode"] = {
            "old": "R2", "rollout": "R3"}[args.routing_replay]
    if args.routing_replay == "rollout":
        config[f"{ROLLOUT}.enable_rollout_routing_replay"] = True
    if args.use_peft:
        config |= {f"{MODEL}.lora_rank": args.lora_r, f"{MODEL}.lora_alpha": args.lora_alpha,
                   f"{MODEL}.target_modules": args.lora_target_modules or "all-linear"}
    return config


REWARD = {  # the body of compute_score for a verifier
    "math": ["from math_verify import parse, verify",
             "return float(verify(parse(f'${ground_truth}$'), parse(solution_str)))"],
    "exact": ["return float(solution_str.strip() == ground_truth.strip())"]}


def data_notes(args):
    """Lines that say which files verl needs beside the command."""
    system = '{"role": "system", ...}, ' if args.system_prompt else ""
    notes = [f"train.parquet, test.parquet: the rows of {args.dataset_name or 'the task'} with",
             f'    prompt = [{system}{{"role": "user", "content": ...}}], data_source = any name,',
             '    reward_model = {"style": "rule", "ground_truth": the answer}']
    for flag in ("system_prompt", "prompt_template"):
        if getattr(args, flag):
            notes.append(f"    --{flag} {getattr(args, flag)!r} goes into prompt")
    if (args.dataset_name or "").startswith("reasoning_gym:"):
        notes.append("    ground_truth = the entry as JSON, reward.py: reasoning_gym's "
                     "score_answer")
        return notes
    kind = (args.verifier or ["math" if args.dataset_name else "exact"])[0]
    path, _, name = kind.rpartition(":")
    module = path.removesuffix(".py").replace("/", ".")
    body = REWARD.get(kind, [f"from {module} import {name}",
                             f"return float({name}(solution_str, ground_truth))"])
    signature = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"
    notes += ["reward.py:", f"    {signature}", *(f"        {line}" for line in body)]
    if len(args.verifier) > 1:
        notes.append(f"    and the sum with {' '.join(args.verifier[1:])}")
    if not args.model_name_or_path:
        notes.append("CHECKPOINT: the folder of a model, for example runs/gspo/checkpoints/step_50")
    return notes


def differences(args):
    """Lines about what verl does otherwise under these overrides, without an error."""
    mode = loss_mode(args)
    notes = []
    if args.advantage == "group" and args.scale_rewards == "group":
        notes.append("verl divides by the standard deviation with G - 1: rewards 1,0,1,0 give "
                     "advantages of 0.866, here 1")
    if args.advantage.startswith("reinforce_plus_plus"):
        notes.append("verl whitens with the unbiased variance")
    if mode == "vanilla" and not args.dual_clip:
        notes.append("clip_ratio_c: verl's default of 3 is a dual clip; 1e9 switches it off")
    if mode in ("dppo_tv", "dppo_kl"):
        notes.append("clip_ratio_c is the cap of the ratio; verl's configuration says 3, the "
                     f"paper {args.constants['cap']:g}")
    if mode == "cispo":
        notes.append("clip_ratio_low: verl's default of 0.2 gives CISPO's weight a floor of 0.8")
    if mode == "gspo":
        notes.append("loss_agg_mode: verl's default, token-mean, weights responses by their length "
                     "in GSPO too")
    if mode == "gspo" and OBJECTIVES[args.objective].ratio == "sequence":
        notes.append("verl's gspo is GSPO-token: the same value and gradient while all tokens of a "
                     "response have one advantage")
    if mode == "geo_mean":
        notes.append("geo_mean averages over a micro-batch and adds the micro-batches: a smaller "
                     "micro-batch makes a larger gradient")
    if mode in ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl"):
        notes.append("clip_ratio alone would change nothing: verl reads clip_ratio_low and _high, "
                     "0.2 each by default")
    if args.beta and args.kl_estimator.startswith("k3") and not kl_in_rewards(args):
        notes.append("verl limits k3 to at most 10 per token")
    if args.old_logp == "sampler":
        notes.append("bypass_mode: verl.trainer.main_ppo_v0 would replace loss_mode by PPO's clip; "
                     "main_ppo keeps it")
    if args.mismatch_mask and not args.mismatch:
        notes.append("rollout_rs_threshold bounds sampler / trainer, the inverse of "
                     "--mismatch_mask_bounds")
    if args.dynamic_sampling:
        notes.append("verl samples until the batch is full; here ten rounds at most")
    if args.warmup_steps or args.lr_scheduler_type != "constant_with_warmup":
        notes.append("verl changes the learning rate once per rollout batch, and its warm-up "
                     "starts at 0")
    if args.half and args.sampler_dtype == "float32":
        notes.append("float32 sampling in vLLM is slow on a GPU")
    notes.append("ppo_mini_batch_size counts prompts, ppo_micro_batch_size_per_gpu responses")
    return notes


def hydra(value):
    """A value as hydra reads it from the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z_~./][\w./+:~-]*", value):
        return str(value)
    escaped = value.replace('"', '\\"')
    return f'"{escaped}"'


def verl_config(args):
    """A shell script: comments, and the command that launches verl with the settings of this run;
    or one comment that says why there is none."""
    lacks = missing(args)
    if lacks:
        return f"# no equivalent in verl 0.9.1: it has no {', no '.join(lacks)}"
    args = with_length_limit(args)
    notes = [*data_notes(args), *differences(args)]
    others = other_flags(args, EXPRESSED)
    if others:
        notes.append(f"not in verl's configuration: {' '.join(others)}")
    words = [shlex.quote(f"{key}={hydra(value)}") for key, value in overrides(args).items()]
    launch = "python3 -m verl.trainer.main_ppo"
    if args.routing_replay != "none":
        launch += " --config-path=config --config-name=ppo_megatron_trainer.yaml"
    comments = [f"# {note}" for note in (
        f"{args.algorithm} by verl 0.9.1 (pip install verl==0.9.1 and vllm), never run here: "
        "it needs a GPU", *notes)]
    return "\n".join([*comments, " \\\n    ".join([launch, *words])])
