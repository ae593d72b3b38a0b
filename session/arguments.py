"""Settings: the flags of train.py. One dataclass field per flag, one row of presets per algorithm.
session/checks.py refuses values and combinations that cannot run.

Settings are merged from layers, {flag: value} each. The first layer that has a flag decides: the
command line, the file of --config, with --resume the run's own settings, the algorithm's row in
PRESETS, the defaults for the kind of policy (the built-in tiny MoE, or a Hugging Face checkpoint),
the field's default. `convert` gives the values of all layers the type of their flag. `config.json`
in the run folder shows the result. A flag with the same meaning as one of TRL or transformers has
the same name.
"""

import argparse
import json
import os
import shlex
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin

import torch

from advantages import ADVANTAGES
from features import FEATURES
from features.feature import flag, unescape
from losses import OBJECTIVES, with_options
from plumbing.parallel import devices
from plumbing.refusal import Refusal
from session.checks import check_settings, is_user_file, suggest
from session.config import find_settings, read_config
from session.errors import errors_in_one_line


# Every row of losses.OBJECTIVES is an algorithm. A preset is an algorithm that also sets flags that
# were not given; without an `objective`, its objective is the row of the same name.
PRESETS = {
    "reinforce": dict(scale_rewards="none", steps_per_generation=1),
    "rloo": dict(objective="reinforce", reduction="sequence-sum", advantage="leave_one_out",
                 steps_per_generation=1),
    "reinforce_plus_plus": dict(objective="ppo", reduction="token-mean",
                                advantage="reinforce_plus_plus"),
    "ppo": dict(advantage="gae", lam=0.95),                  # lam: a flag of the critic's file
    "dr_grpo": dict(scale_rewards="none"),
    "icepop": dict(objective="rollout_is", epsilon=0.5, epsilon_high=4.0, old_logp="sampler"),
    "scalerl": dict(objective="cispo", epsilon_high=4.0, reduction="group-token-mean",
                    scale_rewards="batch", old_logp="sampler"),
    "maxrl": dict(objective="grpo", reduction="sequence-sum", scale_rewards="mean"),
}
PRESETS |= dict.fromkeys(("dapo", "dapo_paper"), dict(dynamic_sampling=True, overlong_cache=0.2))
PRESETS |= dict.fromkeys(("dppo", "dppo_kl", "kpop", "ipo", "rollout_is", "dro"),
                         dict(old_logp="sampler"))
for feature in FEATURES:
    PRESETS |= feature.presets
ALGORITHMS = {name: {"objective": name} | PRESETS.get(name, {})
              for name in dict.fromkeys([*OBJECTIVES, *PRESETS])}


OWN_DATA = {"dataset_name|environment": "the built-in task has its own prompts and its own "
                                        "reward"}
OWN_MODEL = {"model_name_or_path": "a checkpoint has its own shape and no supervised warm-up"}
OWN_SUMS = {"dataset_name|environment": "it describes the built-in sums"}
OF_TINY = dict(without=OWN_MODEL, evaluation=True, fixed=True)    # flags of the tiny MoE

BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit",
                "paged_adamw_32bit": "PagedAdamW32bit"}      # --optim: class in bitsandbytes.optim


def read_object(value):
    """The text of a JSON object, @FILE with such a text, or a mapping of a file, as a dict. Raises
    ValueError for any other text."""
    if isinstance(value, str) and value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8-sig")
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError
    return value


@dataclass(frozen=True)
class Core:
    """The flags of the core, and what follows from them."""

    algorithm: str = flag(
        "gspo", "training algorithm: a row of losses.OBJECTIVES, or a preset that also sets "
                "other flags (docs/family.md)", section="the algorithm", choices=ALGORITHMS,
        also="loss objective method preset importance_sampling_level=gspo")
    epsilon: float | None = flag(None, "lower end of the clip range, 1 - epsilon; without "
                                 "--epsilon_high also the upper end, 1 + epsilon",
                                 unset="the value of the algorithm's paper",
                                 also="clip clip_range cliprange clip_ratio clip_eps "
                                      "clip_ratio_low eps")
    epsilon_high: float | None = flag(None, "upper end of the clip range, 1 + epsilon_high",
                                      unset="the value of the algorithm's paper")
    dual_clip: float | None = flag(
        None, "drop the gradient of tokens with a negative advantage whose token ratio is above "
              "this value (1912.09729)", unset="off", above=1, also="delta")
    off_policy_mask: float | None = flag(
        None, "drop responses with a negative advantage whose mean log-prob fell by more than "
              "this many nats (2512.02556)", unset="off", above=0,
        also="off_policy_mask_threshold")
    reduction: str | None = flag(None, "how the loss is averaged over tokens",
                                 unset="that of the algorithm's paper",
                                 choices=("sequence-mean", "token-mean", "group-token-mean",
                                         "constant", "sequence-sum"))
    advantage: str = flag("group", "how advantages are computed from rewards; token_credit "
                          "(built-in task only) is group, but tokens before the first wrong step "
                          "get no negative advantage", choices=ADVANTAGES)
    scale_rewards: str = flag("group", "divide advantages by the group's std, the batch's std, the "
                              "group's mean, or nothing",
                              choices=("group", "batch", "mean", "none"))

    old_logp: str = flag(
        "recompute", "recompute the old log-probs with a forward pass, or use the log-probs that "
                     "the sampler recorded", section="the sampler and the routers",
        choices=("recompute", "sampler"))
    sampler: str | None = flag(
        None, "what samples the rollouts: vllm (in the same process), or FILE.py:CLASS, "
              "your own class (docs/data.md#another-sampler)", unset="the built-in sampler",
        evaluation=True, also="use_vllm=vllm vllm_mode=vllm")

    model_name_or_path: str | None = flag(None, "hub id or folder of a pretrained causal language "
                                          "model", unset="a tiny MoE", section="the policy",
                                          checkpoint=True, evaluation=True, fixed=True,
                                          also="model model_id pretrained checkpoint")
    hidden_size: int = flag(
        96, "tiny MoE: width of the hidden states", at_least=1, **OF_TINY,
        must=(lambda width: width % 8 == 0, "be a multiple of 8: the tiny MoE has 4 attention "
                                            "heads, each of an even width"))
    num_hidden_layers: int = flag(4, "tiny MoE: number of layers; more than 4 have "
                                  "defaults of their own", at_least=1, **OF_TINY)
    num_experts: int = flag(8, "tiny MoE: experts per layer", at_least=1, **OF_TINY)
    num_experts_per_tok: int = flag(
        2, "tiny MoE: experts used per token", at_least=1, **OF_TINY)
    cold_start_steps: int = flag(320, "tiny MoE: optimizer steps of the supervised warm-up before "
                                 "RL", at_least=0, **OF_TINY)
    cold_start_learning_rate: float = flag(3e-3, "tiny MoE: learning rate of the supervised "
                                           "warm-up", above=0, **OF_TINY)

    dataset_name: str | None = flag(
        None, "problems: a hub id, or a .jsonl, .json, .csv or .parquet file",
        unset="running sums", section="the task",
        needs={"model_name_or_path|environment": "the built-in tiny MoE knows only the characters "
                                                 "of its own task"},
        evaluation="kept", also="data train_dataset train_file data_path train_data task")
    test_dataset_name: str | None = flag(
        None, "held-out problems", unset="the test split of the dataset, or a part of it",
        evaluation="problems",
        also="eval_dataset eval_data test_file validation_file validation_split",
        needs={"dataset_name": "the built-in task and the rows() of an environment have held-out "
                               "problems of their own"})
    columns: list[str] = flag([], "names of the prompt column and of the answer column",
                              unset="prompt, question or problem; answer or solution",
                              must=(lambda names: len(names) in (0, 2),
                                    "be two names: the prompt column and the answer column"),
                              needs=OWN_DATA, evaluation="problems")
    verifier: list[str] = flag([], "what computes the reward: math (math-verify), exact or "
                               "FILE.py:FUNCTION; the rewards of several functions are added",
                               unset="math",
                               needs=OWN_DATA, evaluation="kept",
                               also="reward reward_fn reward_func reward_funcs reward_function "
                                    "reward_model")
    verifier_timeout: float | None = flag(
        None, "time limit in seconds of a reward function of one response", unset="3", above=0,
        needs=OWN_DATA, evaluation="kept")
    reward_weights: list[float] = flag([], "weights of the reward's components, in their order",
                                       unset="1 each", needs=OWN_DATA, evaluation="kept")
    chat_template: bool = flag(True, "use the tokenizer's chat template if it has one",
                               evaluation="kept")
    chat_template_kwargs: dict = flag(
        {}, "variables of the chat template as a JSON object, '{\"enable_thinking\": false}', or "
            "@FILE",
        unset="none", needs=OWN_DATA, without="chat_template=False", evaluation="kept",
        read=read_object)
    system_prompt: str | None = flag(
        None, "system message before every prompt that has none of its own, or @FILE; without a "
              "chat template its text is put above the prompt", unset="none", needs=OWN_DATA,
        evaluation="kept")
    prompt_template: str | None = flag(None, "text around every prompt, or @FILE, with {prompt} "
                                       "where the prompt goes: instructions, worked examples",
                                       unset="the prompt alone", needs=OWN_DATA,
                                       evaluation="kept")
    stop: list[str] = flag([], "strings that end a response; \\n stands for a line break",
                           unset="only the end-of-sequence token", read=unescape,
                           must=(all, "not be empty: give the text that ends a response"),
                           evaluation="kept", also="stop_sequences eos")
    min_terms: int = flag(
        8, "built-in task: smallest number of terms of a sum", at_least=1, without=OWN_SUMS,
        evaluation="problems")
    max_terms: int = flag(12, "built-in task: largest number of terms of a sum",
                          without=OWN_SUMS, evaluation="problems")
    verbose_answers: bool = flag(False, "built-in task: answers write every step as a+b=c",
                                 without=OWN_SUMS, evaluation="problems")

    steps: int = flag(50, "number of rollout batches; a resumed run can be given more",
                      section="the rollout batch", at_least=1,
                      also="num_train_epochs num_epochs epochs max_steps iterations total_steps "
                           "total_episodes")
    prompts_per_step: int = flag(32, "prompts per rollout batch", at_least=1, fixed=True,
                                 also="batch_size bs train_batch_size rollout_batch_size")
    num_generations: int = flag(8, "group size G: responses per prompt; at pass rate p a share "
                                "p^G + (1-p)^G of the groups is all right or all wrong and "
                                "teaches nothing", at_least=1,
                                also="group_size num_samples n n_samples num_rollouts "
                                     "samples_per_prompt")
    steps_per_generation: int = flag(4, "mini-batches per rollout batch, one optimizer step each",
                                     at_least=1, fixed=True,
                                     also="mini_batch_size num_minibatches ppo_mini_batch_size")
    num_iterations: int = flag(
        1, "μ of GRPO: how often every mini-batch is used, in a new order each time; the old "
           "log-probs stay those of the policy that sampled", at_least=1,
        fixed=True, also="mu ppo_epochs max_epochs")
    max_prompt_length: int = flag(
        1024, "longest prompt in tokens", at_least=1, evaluation="kept")
    max_completion_length: int | None = flag(None, "longest response in tokens",
                                             unset="256; for the built-in task, its longest "
                                                   "answer", at_least=1, evaluation="kept",
                                             also="max_new_tokens max_tokens max_length "
                                                  "max_response_length response_length")
    temperature: float = flag(1.0, "temperature of sampling and of all log-probs",
                              at_least=1e-6,                 # logits are divided by it
                              evaluation="kept", also="temp")

    learning_rate: float = flag(4e-4, "peak learning rate", section="the optimizer", above=0,
                                also="lr peak_lr")
    lr_scheduler_type: str = flag("cosine", "learning-rate schedule after warm-up",
                                  choices=("linear", "cosine", "constant_with_warmup"))
    warmup_steps: int = flag(10, "optimizer steps of linear learning-rate warm-up", at_least=0)
    optim: str = flag("adamw_torch_fused", "AdamW of torch, or of bitsandbytes (pip install "
                      "bitsandbytes) with moments in 8 bits, or in pages that a full GPU moves to "
                      "the CPU's memory", fixed=True, package=dict.fromkeys(BITSANDBYTES,
                                                                            "bitsandbytes"),
                      choices=("adamw_torch_fused", "adamw_torch", *BITSANDBYTES))
    weight_decay: float = flag(0.0, "AdamW's decoupled weight decay: each step also shrinks the "
                               "weights by this share of the learning rate", at_least=0)
    max_grad_norm: float = flag(1.0, "clip the gradient norm at this value; 0: no clipping",
                                at_least=0, also="grad_clip clip_grad gradient_clipping")

    micro_batch_size: int | None = flag(None, "responses per forward and backward pass; in 16 bits "
                                        "an upper limit, because all passes must have equal sizes",
                                        unset="the whole mini-batch", section="the machine",
                                        at_least=1, also="gradient_accumulation_steps "
                                        "per_device_train_batch_size")
    scoring_batch_size: int | None = flag(None, "responses per forward pass without a gradient, "
                                          "such as that of the old log-probs; float32 only, "
                                          "because in 16 bits rounding depends on the number of "
                                          "rows", unset="--micro_batch_size", at_least=1)
    gradient_checkpointing: bool = flag(False, "save memory by recomputing activations in the "
                                        "backward pass; responses then share no computation",
                                  also="activation_checkpointing")
    plain: bool = flag(False, "use the plain implementation, for reading and for comparison: one "
                       "row per response and no shared computation", evaluation=True)
    cuda_graphs: bool = flag(False, "on a CUDA GPU: replay the token steps of sampling as CUDA "
                             "graphs, which are checked in every batch; on other devices nothing "
                             "changes", without={"plain": "its steps are not replayed",
                                                 "sampler": "it samples by itself",
                                                 "old_logp=sampler": "the check of a batch needs "
                                                 "recomputed log-probs"})
    tf32: bool = flag(False, "on a CUDA GPU: compute float32 products on tensor cores, which "
                      "round their factors to 11 bits (TF32)")
    bf16: bool | None = flag(None, "bfloat16 autocast; weights stay float32",
                             unset="on for a checkpoint on a GPU that has bfloat16")
    fp16: bool | None = flag(None, "float16 autocast with a gradient scaler; weights stay float32",
                             unset="on for a checkpoint on a GPU without bfloat16")
    device: str = flag("auto", "device to compute on; auto: a CUDA GPU if there is one, else the "
                       "CPU; mps (Apple GPUs) has not been tested on real hardware",
                       choices=("auto", "cpu", "cuda", "mps"), evaluation=True,
                       also="cpu=cpu use_cpu=cpu no_cuda=cpu")
    shard: bool = flag(False, "with torchrun: shard the model with FSDP2 instead of keeping a full "
                       "copy in every process", also="fsdp fsdp2 deepspeed", fixed=True)

    config: str | None = flag(None, "YAML file of flags by their names, for example one of "
                              "recipes/, or the config.json of a run; command-line flags "
                              "override it",
                              unset="none", section="the run")
    dry_run: bool = flag(False, "show a prompt, a response with its reward, and the memory and the "
                                "time that the run needs; no run folder is left", without="resume")
    output_dir: str | None = flag(None, "run folder",
                                  unset="runs/<algorithm>, numbered if it exists",
                                  also="out save_dir run_name")
    overwrite_output_dir: bool = flag(False, "replace the run in --output_dir",
                                      needs={"output_dir": "name the run"}, also="overwrite force")
    resume: bool = flag(
        False, "continue the run in --output_dir from its last checkpoint",
        needs={"output_dir": "name the run"},
        without={"overwrite_output_dir": "either continue the run or replace it"},
        also="resume_from_checkpoint continue")
    trust_run_code: bool = flag(False, "with --resume: import every FILE.py:NAME that the run's "
                                "config.json names; without this flag only those that are typed "
                                "again",
                                needs={"resume": "what the command line or --config names is "
                                                 "run in any case"})
    save_steps: int = flag(10, "number of rollout batches between checkpoints, of which the last "
                           "two are kept; 0: save only at the end", at_least=0,
                           also="save_strategy")
    save_tokens: bool | None = flag(None, "save one group's tokens per rollout batch for `eval.py "
                                    "view`", unset="only for the tiny MoE")
    eval_steps: int = flag(0, "number of rollout batches between evaluations; 0: evaluate only "
                           "before and after training", at_least=0, without="eval_samples=0",
                           also="test_freq eval_strategy")
    eval_prompts: int = flag(256, "held-out prompts per evaluation", at_least=1)
    eval_samples: int = flag(4, "responses sampled per held-out prompt; 0: no evaluation",
                             at_least=0, also="num_generations_eval")
    seed: int = flag(0, "random seed, which also decides what is held out", at_least=0,
                     at_most=2 ** 32 - 1,                    # the largest that NumPy takes
                     evaluation="kept", fixed=True, also="data_seed")

    # {flag: value} of the command line, of --config and, with --resume, of the run's config.json.
    explicit_flags: dict = field(default_factory=dict, compare=False)

    @property
    def played(self):
        """Whether responses are played with an environment (features/turns.py)."""
        return bool(getattr(self, "environment", None))

    @property
    def builtin_task(self):
        """Whether the policy learns the built-in sums, and neither a data set nor an environment's
        rows."""
        return not (self.dataset_name or self.played)

    @property
    def updates_per_batch(self):
        """Optimizer steps per rollout batch."""
        return self.steps_per_generation * self.num_iterations

    @property
    def mini_batch_rows(self):
        """Responses of a mini-batch."""
        return self.prompts_per_step // self.steps_per_generation * self.num_generations

    @property
    def objective(self):
        """Row of losses.OBJECTIVES: ratio, clip and reduction."""
        return ALGORITHMS[self.algorithm]["objective"]

    @cached_property
    def row(self):
        """The objective's row with the two bounds beside its clip range."""
        return with_options(self.objective, dual_clip=self.dual_clip,
                            off_policy_mask=self.off_policy_mask)

    @property
    def router_shift(self):
        """Whether the objective's ratio contains RSPO's router shift."""
        return OBJECTIVES[self.objective].ratio == "log-shifted"

    @cached_property
    def autocast_dtype(self):
        """The format of autocast: torch.bfloat16, torch.float16, or None without autocast."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    @property
    def arithmetic(self):
        """The number format of forwards: "bfloat16", "float16", or "float32" without autocast."""
        return str(self.autocast_dtype or torch.float32).removeprefix("torch.")


# Fields come in the reverse order of bases: those of the core first.
FLAGS = [feature.flags for feature in FEATURES if feature.flags]


@dataclass(frozen=True)
class Settings(*reversed(FLAGS), Core):
    """What a run was asked to do, with all defaults filled in: the flags of the core and those of
    the features. Nothing changes it: what the data decide, such as the length limit of the built-in
    task, stands in the Task."""

    @property
    def features(self):
        """The classes of the features that are on."""
        return [feature for feature in FEATURES if feature.on(self)]


for name, row in PRESETS.items():        # a preset that names a flag of no feature is unknown
    if not row.keys() - {"objective"} <= Settings.__dataclass_fields__.keys():
        del ALGORITHMS[name]

# The flags that --help shows first.
FIRST = ("algorithm", "model_name_or_path", "dataset_name", "verifier", "steps", "learning_rate",
         "num_generations", "max_completion_length", "output_dir", "seed")

# Defaults for a checkpoint that differ from those of the tiny MoE: a smaller learning rate, smaller
# batches, a shorter warm-up, and fewer checkpoints, which are larger.
CHECKPOINT_DEFAULTS = dict(learning_rate=1e-6, prompts_per_step=8, steps_per_generation=2,
                           warmup_steps=5, save_steps=25)

# Defaults for a tiny MoE of more than 4 layers: the shape, the sums and the warm-up with which
# 48 layers learn on one CPU core, and a learning rate that every algorithm survives there.
DEEP_DEFAULTS = dict(learning_rate=1e-4, prompts_per_step=16, hidden_size=48, num_experts=16,
                     min_terms=3, max_terms=5, cold_start_steps=500, cold_start_learning_rate=1e-3)

SHALLOW = 4     # layers of the tiny MoE up to which the fields' own defaults hold

# Defaults and presets that do not hold with an environment: its rows are no sums, and they have
# one source.
NO_ENVIRONMENT = ("min_terms", "max_terms", "stage2_step")


# What to do instead: names that TRL or an older train.py has and that are no other name of a flag.
INSTEAD = {
    "it is not needed: every rollout batch is logged":
        "logging_steps logging_strategy logging_first_step",
    "it is not needed: samples.jsonl has responses of every rollout batch":
        "log_completions log_unique_prompts num_completions_to_print",
    "it is not needed: a run is evaluated before and after training (--eval_samples)":
        "eval_on_start",
    "the last two checkpoints are kept": "save_total_limit",
    "it is 0.9 in every run": "adam_beta1",
    "it is 0.95 in every run": "adam_beta2",
    "it is 1e-8 in every run": "adam_epsilon",
    "weights are float32; --bf16 and --fp16 set the arithmetic": "dtype torch_dtype",
    "it is --prompts_per_step times --num_generations": "generation_batch_size",
    "write --algorithm and --reduction (docs/data.md#from-a-trl-script)": "loss_type",
    "write --entropy_quantile, and 1 minus the value": "top_entropy_quantile",
    "--entropy_coef is constant": "use_adaptive_entropy entropy_coef_min entropy_coef_max "
                                  "entropy_coef_delta entropy_target",
    "it is a constant of the objective's row in losses.py":
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos "
        "vespo_lambda_neg",
    "write --mismatch and --mismatch_mask (docs/data.md#from-a-trl-script)":
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_cap",
    "write --max_turns, which counts all turns of a response": "max_tool_calling_iterations",
    "write it as an --environment FILE.py:CLASS (docs/data.md#an-environment)": "tool",
}

# Flags of one call of train.py, which are not settings of a run.
CALL_FLAGS = {"config", "dry_run", "resume", "overwrite_output_dir", "output_dir",
              "trust_run_code"}

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
TYPES = {int: "an integer", float: "a number", bool: "true/false, yes/no or 1/0",
         str: "one text", dict: 'a JSON object like {"enable_thinking": false}'}


# ------------------------------------------------------------------------------------- the layers

def parse(argv, run_settings=None):
    """Command line -> Settings, with all defaults filled in and all values checked. run_settings:
    {flag: value} of the run whose checkpoint is evaluated.

    Raises Refusal with one line that names the flag and the values that are allowed.
    """
    typed = parse_flags(argv)
    file = read_recipe(typed["config"]) if "config" in typed else {}
    explicit = merge(run_settings or {}, file, typed)
    run = {}
    if explicit.get("resume") and "output_dir" in explicit:
        folder = explicit["output_dir"]
        run = read_run_config(folder)
        explicit = merge(read_run_layer(find_settings(run), explicit, folder), explicit)
    settings = with_defaults(explicit)
    check_settings(settings)
    settings = resolve(settings)
    check_resumable(settings, run)
    return settings


def with_defaults(explicit):
    """The Settings of {flag: value}, with presets and defaults in place of what it lacks, without
    any check."""
    # an unknown algorithm has no preset; check_settings refuses it
    row = ALGORITHMS.get(explicit.get("algorithm", Settings.algorithm), {})
    preset = {name: value for name, value in row.items() if name != "objective"}
    deep = explicit.get("num_hidden_layers", Settings.num_hidden_layers) > SHALLOW
    defaults = DEEP_DEFAULTS if deep else {}
    defaults = CHECKPOINT_DEFAULTS if explicit.get("model_name_or_path") else defaults
    layer = {name: value for name, value in (defaults | preset).items()
             if not (name in NO_ENVIRONMENT and explicit.get("environment"))}
    return Settings(**merge(convert_layer(layer), explicit), explicit_flags=explicit)


def merge(*layers):
    """One layer of several, of which the last one that has a flag decides. --epsilon without
    --epsilon_high is both ends of the clip range, so that it replaces both of the layers before."""
    merged = {}
    for layer in layers:
        if "epsilon" in layer:
            merged.pop("epsilon_high", None)
        merged |= layer
    return merged


def parse_flags(argv):
    """{flag: value} of what stands on the command line."""
    texts, unknown = make_parser().parse_known_args(argv)
    for word in unknown:
        raise Refusal(f"unknown argument {word}{suggest_flag(word)}")
    return convert_layer(vars(texts))


def read_recipe(path):
    """{flag: value} of the file of --config. A FILE.py:NAME is looked for beside the file, too."""
    layer = convert_file(read_config(path), f"--config {path}")
    return {name: find_beside(value, Path(path).parent) for name, value in layer.items()}


def read_run_layer(values, typed, folder):
    """{flag: value} of what the config.json of a run holds. A FILE.py:NAME in it would be imported
    and run: `typed`, the flags of the command line and of --config, must name the same flag, or
    have trust_run_code. Raises Refusal, which names the file and the flag."""
    layer = convert_file(values, f"{folder}/config.json")
    code = {name: value for name, value in find_code(layer).items() if name not in typed}
    if code and not typed.get("trust_run_code"):
        raise Refusal(f"{folder}/config.json names code that would be run: {format_flags(code)};"
                      " if you trust it, type that again, or add --trust_run_code")
    return layer


def convert_file(values, where):
    """convert_layer of a file, which its errors name."""
    try:
        for name in values:
            if name in CALL_FLAGS - {"output_dir"}:
                raise Refusal(f"{name} can only be typed: leave it out")
        return convert_layer(values)
    except Refusal as error:
        raise Refusal(f"{where}: {error}") from None


def convert_layer(values):
    """{flag: value of its type} of {flag: value}. Raises Refusal for an unknown flag, and as
    `convert` does."""
    known = {f.name: f for f in flags()}
    unknown = [f"unknown argument --{name}{suggest_flag(f'--{name}')}"
               for name in values if name not in known]
    if unknown:                                              # all of them at once
        raise Refusal("; ".join(unknown))
    return {name: convert(known[name], value) for name, value in values.items()}


def convert(f, value):
    """A value as the type of the flag f. value: text of a command line or of a YAML file ("1e-6",
    "true"), a value of JSON, a default, or a list of them. Raises Refusal, which names the
    flag."""
    if get_origin(f.type) is list:
        return [convert_one(f, one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and len(value) == 1:          # TRL's report_to: [wandb]
        value, = value
    return convert_one(f, value)


def convert_one(f, value):
    """`convert` of one value, or of one item of a list."""
    kind = value_type(f)
    if kind is bool and str(value).lower() in BOOLEANS:
        return BOOLEANS[str(value).lower()]
    if kind is not bool and (isinstance(value, str) or type(value) in (int, kind)):
        try:
            return f.metadata.get("read", kind)(value)
        except OSError as error:
            raise Refusal(f"--{f.name} {value}: cannot be read: {error}") from None
        except ValueError:
            pass
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    raise Refusal(f"--{f.name} {text} is not {TYPES[kind]}")


def value_type(f):
    """The type of a flag's value: X of X, X | None and list[X]."""
    return next(t for t in (*get_args(f.type), f.type) if t is not NoneType)


def resolve(settings):
    """The Settings with the values that follow from others in place of None."""
    row = OBJECTIVES[settings.objective]
    epsilon, high = row.clip_range(settings.epsilon, settings.epsilon_high)
    tokens = settings.save_tokens
    return replace(
        settings, epsilon=epsilon, epsilon_high=high,
        reduction=settings.reduction or row.reduction, **devices.choose_autocast(settings),
        save_tokens=not settings.model_name_or_path if tokens is None else tokens)


def flags():
    """The fields of Settings that are flags."""
    return [f for f in fields(Settings) if f.name != "explicit_flags"]


# ------------------------------------------------------------------------------------- a run's own

def read_run_config(folder):
    """config.json of the run in a folder: {"settings": what was set, "resolved": what follows,
    ...}; {} if there is no run, or if the file is not what a run writes."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        steps = config["resolved"]["steps"]
        valid = isinstance(config["settings"], dict) and type(steps) is int
        return config if valid and isinstance(config.get("changes", []), list) else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def check_resumable(settings, run):
    """Raise Refusal if there is no run to resume, or if a flag on which its saved state depends
    is no longer what it was. run: what read_run_config returns; {} for a new run."""
    if settings.resume and not run:
        raise Refusal(f"--resume: {settings.output_dir} has no readable config.json of a run: "
                      "put it back, or start from one of its checkpoints (--model_name_or_path)")
    before = run.get("resolved", {})
    for f in flags():
        now = getattr(settings, f.name)
        was = before.get(f.name, now)
        if "fixed" in f.metadata and was != now:
            raise Refusal(f"--resume: {f.name} was {format_value(was)} in "
                          f"{settings.output_dir}, now {format_value(now)}: the saved state "
                          "depends on it; leave it out, or start a new run")


def is_code(value):
    """Whether a value, or an item of a list, is a FILE.py:NAME, which would be imported and run."""
    if isinstance(value, list):
        return any(map(is_code, value))
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


def find_code(values):
    """The part of {flag: value} whose values name code."""
    return {name: value for name, value in values.items() if is_code(value)}


def find_beside(value, folder):
    """A value of a file in `folder`; a FILE.py:NAME with the path that is there: as it stands, or
    else beside that file."""
    if isinstance(value, list):
        return [find_beside(one, folder) for one in value]
    beside = str(folder / str(value))
    return beside if is_code(value) and not is_user_file(value) and is_user_file(beside) else value


# ------------------------------------------------------------------------------- the command line

def format_value(value):
    """A value as it is typed on a command line."""
    if isinstance(value, list):
        return " ".join(map(format_value, value))
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return shlex.quote(text.replace("\n", "\\n"))           # a line break, as it was typed


def format_flags(values):
    """{flag: value} as typed on a command line."""
    return " ".join(f"--{name}" if value is True else f"--{name} {format_value(value)}"
                    for name, value in values.items())


def suggest_flag(word):
    """What to do about an unknown word of the command line: the flag that other programs call so
    (`also`), else one with nearly the same spelling."""
    if not word.startswith("-"):
        return ", which belongs to no flag; train.py --help lists all flags"
    name = word.split("=")[0].lstrip("-").lower().replace("-", "_")
    for reason, names in INSTEAD.items():
        if name in names.split():
            return f": {reason}"
    meant = suggest(name, [f.name for f in flags()], cutoff=0.85).replace("mean ", "mean --")
    for f in flags():
        for other in f.metadata.get("also", "").split():
            theirs, equals, value = other.partition("=")
            if name == theirs:
                meant = (f", did you mean --{f.name}{equals and ' '}{value} "
                         f"({f.metadata['help']})?")
    return f"{meant}; train.py --help lists all flags"


def check_flags_first(argv):
    """Before the slow imports of train.py: print --help, refuse wrong flags (exit code 2), or print
    the first line of a run."""
    with errors_in_one_line():
        parse(argv)
    if os.environ.get("RANK", "0") == "0":
        print("loading transformers ...", flush=True)


class Parser(argparse.ArgumentParser):
    """A parser that raises Refusal instead of printing the whole usage."""

    def error(self, message):
        raise Refusal(message)


@cache
def make_parser():
    """A flag per field of Settings, in sections; the most important flags come first."""
    parser = Parser(prog="train.py", usage="train.py [--flag value ...]", allow_abbrev=False,
                    description="Train a tiny MoE or a pretrained model with GSPO or a related "
                                "algorithm.")
    left = {f.name: f for f in flags()}
    owned = [f.name for owner in (Core, *FLAGS) for f in fields(owner)]
    for name, f in left.items():
        if owned.count(name) > 1 or "help" not in f.metadata:
            raise ValueError(f"the flag --{name} of a feature has the name of another one, or "
                             "is not made by features.feature.flag")
    section = parser.add_argument_group("the ten most important flags")
    for name in FIRST:
        add_flag(section, left.pop(name))
    for f in flags():
        if "section" in f.metadata:
            section = parser.add_argument_group(f.metadata["section"])
        if f.name in left:
            add_flag(section, f)
    return parser


def add_flag(section, f):
    """Add --name VALUE, whose text `convert` reads. A list takes several values. A switch takes no
    value; a switch that is on by default is turned off by --no_name. A flag that is not given
    leaves nothing behind."""
    kind = value_type(f)
    default = getattr(Settings(), f.name)
    options = {"metavar": kind.__name__, "help": f.metadata["help"]}
    if kind is bool:
        options |= {"nargs": "?", "const": True}
    if get_origin(f.type) is list:
        options["nargs"] = "+"
    if "choices" in f.metadata:
        options["help"] += f"; choices: {', '.join(f.metadata['choices'])}"
    default_text = f.metadata.get("unset") if default in (None, [], {}) else default
    if default_text is not None and default_text is not False:
        for kind_of_policy, values in (("for a checkpoint", CHECKPOINT_DEFAULTS),
                                       (f"with more than {SHALLOW} layers", DEEP_DEFAULTS)):
            if f.name in values:
                default_text = f"{default_text}; {kind_of_policy}: {values[f.name]}"
        options["help"] += f" (default: {default_text})"
    section.add_argument(f"--{f.name}", default=argparse.SUPPRESS, **options)
    if default is True:
        section.add_argument(f"--no_{f.name}", dest=f.name, action="store_false",
                             help=argparse.SUPPRESS, default=argparse.SUPPRESS)
