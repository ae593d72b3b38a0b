"""The settings of a run as overrides for verl 0.9.1, subject by subject (tools/export.py).

A subject returns {key: value}, or ({key: value}, note, ...), or the words for what verl does not
have. tests/tools/test_verl.py looks up every key in verl's own configuration and compares the
losses with verl's own functions under the printed settings.
"""

import re
import shlex

from losses import OBJECTIVES
from session.arguments import BITSANDBYTES

NAME = "verl 0.9.1"
ELSEWHERE = "not in verl's configuration, for your own train.parquet, test.parquet and reward.py"

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"

LOSS_MODE = {  # (ratio, clip) of a row of losses.OBJECTIVES: verl's loss_mode
    ("none", "none"): "gpg", ("token", "min"): "vanilla", ("sequence", "min"): "gspo",
    ("gspo-token", "min"): "gspo", ("log-token", "log-min"): "geo_mean", ("token", "tv"): "dppo_tv",
    ("token", "kl"): "dppo_kl", ("token", "sigmoid"): "sapo", ("token", "weight"): "cispo",
    ("token", "square"): "dro"}
CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl")     # have a clip range
REDUCTION = {"sequence-mean": "seq-mean-token-mean", "token-mean": "token-mean",
             "sequence-sum": "seq-mean-token-sum", "constant": "seq-mean-token-sum-norm"}
ONE_REDUCTION = ("sapo", "geo_mean")    # these average per response, whatever loss_agg_mode says
ADVANTAGE = {"group": "grpo", "leave_one_out": "rloo", "reinforce_plus_plus": "reinforce_plus_plus",
             "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline"}
SCHEDULE = {"constant_with_warmup": "constant", "cosine": "cosine"}
NO_CLIP = 1e9           # verl limits ratios to e^20, so a bound of 1e9 is never reached


def loss_mode(settings):
    """verl's name for the objective of this run; None if verl does not have it."""
    row = OBJECTIVES[settings.objective]
    return LOSS_MODE.get((row.ratio, row.clip))


def megatron(settings):
    """Whether the run needs verl's Megatron worker, which alone has routing replay."""
    return getattr(settings, "routing_replay", "none") != "none"


def rows_per_pass(settings):
    return settings.micro_batch_size or settings.mini_batch_rows


def objective(settings):
    mode = loss_mode(settings)
    if mode is None:
        return f"objective {settings.objective}"
    if settings.reduction not in REDUCTION or (
            mode in ONE_REDUCTION and settings.reduction != "sequence-mean"):
        return f"reduction {settings.reduction} for {settings.objective}"
    dual_clip = settings.row.dual_clip
    if dual_clip and (mode != "vanilla" or dual_clip <= 1):
        return f"dual clip of {dual_clip} for {settings.objective}"
    config = {f"{ACTOR}.policy_loss.loss_mode": mode,
              f"{ACTOR}.loss_agg_mode": REDUCTION[settings.reduction]}
    if mode in CLIPPED:
        config |= {f"{ACTOR}.clip_ratio_low": settings.epsilon,
                   f"{ACTOR}.clip_ratio_high": settings.epsilon_high}
    if mode in ("vanilla", "dppo_tv", "dppo_kl"):
        cap = settings.row.constants.get("cap", dual_clip or NO_CLIP)
        config[f"{ACTOR}.clip_ratio_c"] = cap
    if mode == "sapo":
        config |= {f"{ACTOR}.tau_pos": settings.row.constants["tau_positive"],
                   f"{ACTOR}.tau_neg": settings.row.constants["tau_negative"]}
    if mode == "dro":
        config[f"{ACTOR}.policy_loss.dro_beta"] = settings.row.constants["beta"]
    if settings.reduction == "constant":
        config[f"{ACTOR}.loss_scale_factor"] = settings.max_completion_length
    return config, *objective_notes(settings, mode)


def objective_notes(settings, mode):
    """What verl's defaults would change, and what it does otherwise."""
    per_response = OBJECTIVES[settings.objective].ratio == "sequence"
    return [note for note, on in (
        ("clip_ratio_c: verl's default of 3 is a dual clip; 1e9 switches it off",
         mode == "vanilla" and not settings.row.dual_clip),
        ("clip_ratio_c is the cap of the ratio; verl's configuration says 3, the paper "
         f"{settings.row.constants.get('cap', 0):g}", mode in ("dppo_tv", "dppo_kl")),
        ("clip_ratio_low: verl's default of 0.2 gives CISPO's weight a floor of 0.8",
         mode == "cispo"),
        ("loss_agg_mode: verl's default, token-mean, weights responses by their length in GSPO too",
         mode == "gspo"),
        ("verl's gspo is GSPO-token: the same value and gradient while all tokens of a response "
         "have one advantage", mode == "gspo" and per_response),
        ("geo_mean averages over a micro-batch and adds the micro-batches: a smaller micro-batch "
         "makes a larger gradient", mode == "geo_mean"),
        ("clip_ratio alone would change nothing: verl reads clip_ratio_low and _high, 0.2 each by "
         "default", mode in CLIPPED)) if on]


def advantage(settings):
    if settings.advantage not in ADVANTAGE:
        return f"advantage {settings.advantage}"
    grouped = settings.advantage == "group"
    if grouped and settings.scale_rewards not in ("group", "none"):
        return f"advantages divided by the {settings.scale_rewards}'s statistic"
    config = {"algorithm.adv_estimator": ADVANTAGE[settings.advantage],
              "algorithm.norm_adv_by_std_in_grpo": settings.scale_rewards == "group"}
    if grouped and settings.scale_rewards == "group":
        return config, ("verl divides by the standard deviation with G - 1: rewards 1,0,1,0 give "
                        "advantages of 0.866, here 1")
    if settings.advantage.startswith("reinforce_plus_plus"):
        return config, "verl whitens with the unbiased variance"
    return config


def old_logp(settings):
    if settings.old_logp == "recompute":
        return {}
    return {f"{CORRECTION}.bypass_mode": True}, (
        "bypass_mode: verl.trainer.main_ppo_v0 would replace loss_mode by PPO's clip; main_ppo "
        "keeps it")


def batches(settings):
    return {
        "data.train_batch_size": settings.prompts_per_step,
        f"{ROLLOUT}.n": settings.num_generations,
        f"{ACTOR}.ppo_mini_batch_size": settings.prompts_per_step // settings.steps_per_generation,
        f"{ACTOR}.ppo_epochs": settings.num_iterations,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": rows_per_pass(settings),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": rows_per_pass(settings),
        "trainer.total_training_steps": settings.steps, "trainer.total_epochs": settings.steps,
    }, "ppo_mini_batch_size counts prompts, ppo_micro_batch_size_per_gpu responses"


def sampling(settings):
    return {
        "data.max_prompt_length": settings.max_prompt_length,
        "data.max_response_length": settings.max_completion_length,
        f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.temperature": settings.temperature,
        f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1, f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.tensor_model_parallel_size": 1, f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.val_kwargs.n": settings.eval_samples or 1,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.temperature": settings.temperature}


def optimizer(settings):
    if settings.lr_scheduler_type not in SCHEDULE:
        return f"schedule {settings.lr_scheduler_type}"
    worker = "megatron" if megatron(settings) else "fsdp_config"
    schedule = "lr_decay_style" if megatron(settings) else "lr_scheduler_type"
    notes = []
    if settings.warmup_steps or settings.lr_scheduler_type != "constant_with_warmup":
        notes.append("verl changes the learning rate once per rollout batch, and its warm-up "
                     "starts at 0")
    if settings.weight_decay and megatron(settings):
        notes.append("weight decay: Megatron leaves out biases and the weights of norms, here "
                     "every weight decays")
    own = {}
    if settings.optim in BITSANDBYTES and megatron(settings):
        notes.append(f"Megatron has no {settings.optim}")
    elif settings.optim in BITSANDBYTES:
        own = {f"{ACTOR}.optim.optimizer": BITSANDBYTES[settings.optim],
               f"{ACTOR}.optim.optimizer_impl": "bitsandbytes.optim"}
    return own | {
        f"{MODEL}.enable_gradient_checkpointing": settings.gradient_checkpointing,
        f"{ACTOR}.optim.lr": settings.learning_rate, f"{ACTOR}.optim.betas": [0.9, 0.95],
        f"{ACTOR}.optim.weight_decay": settings.weight_decay,
        f"{ACTOR}.optim.clip_grad": settings.max_grad_norm or NO_CLIP,
        f"{ACTOR}.optim.{schedule}": SCHEDULE[settings.lr_scheduler_type],
        f"{ACTOR}.optim.lr_warmup_steps":
            -(-settings.warmup_steps // settings.updates_per_batch),
        f"{ACTOR}.{worker}.dtype": settings.arithmetic}, *notes


def run(settings):
    """The keys that are about the run, not about what it computes."""
    config = {
        "data.train_files": "train.parquet", "data.val_files": "test.parquet",
        "data.seed": settings.seed, "reward.custom_reward_function.path": "reward.py",
        f"{MODEL}.path": settings.model_name_or_path or "CHECKPOINT",
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.logger": ["console"],
        "trainer.save_freq": settings.save_steps or -1,
        "trainer.test_freq": settings.eval_steps or -1,
        "trainer.default_local_dir": settings.output_dir or f"runs/verl-{settings.algorithm}"}
    notes = ["train.parquet, test.parquet and reward.py are yours to write: see verl's pages"]
    if not settings.model_name_or_path:
        notes.append("CHECKPOINT: a model's folder, for example runs/gspo/checkpoints/step_50")
    return config, *notes


# every subject, and the flags that it expresses, or refuses where they act
SUBJECTS = {
    run: "seed model_name_or_path save_steps eval_steps output_dir",
    batches: "steps prompts_per_step num_generations steps_per_generation num_iterations "
             "micro_batch_size",
    objective: "algorithm epsilon epsilon_high reduction",
    advantage: "advantage scale_rewards",
    optimizer: "learning_rate optim lr_scheduler_type warmup_steps max_grad_norm weight_decay bf16 "
               "fp16 gradient_checkpointing",
    sampling: "temperature max_prompt_length max_completion_length eval_samples",
    old_logp: "old_logp"}


def hydra(value):
    """A value as hydra reads it from the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z_~./][\w./+:~-]*", value):
        return str(value)
    escaped = value.replace('"', '\\"')
    return f'"{escaped}"'


def text(settings, keys):
    """The shell command that launches verl with these keys. A key that begins with + is one that
    verl reads and that its configuration does not list."""
    words = [shlex.quote(f"{key}={hydra(value)}") for key, value in keys.items()]
    launch = "python3 -m verl.trainer.main_ppo"
    if megatron(settings):
        launch += " --config-path=config --config-name=ppo_megatron_trainer.yaml"
    return " \\\n    ".join([launch, *words])
