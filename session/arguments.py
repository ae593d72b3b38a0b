"""Settings: the flags of train.py. One dataclass field per flag, one row of presets per algorithm.
session/checks.py refuses values and combinations that cannot run.

The first of these that has a flag decides: the command line, the file of --config, the algorithm's
row in PRESETS, the defaults for the kind of policy (the built-in tiny MoE, or a Hugging Face
checkpoint), the field's default. With --resume the run's config.json is in place of all but the
command line. A flag with the same meaning as one of TRL or transformers has the same name.
"""

import argparse
import json
import math
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import get_args, get_origin

import torch
import yaml

from advantages import ADVANTAGES
from features import FEATURES
from features.feature import flag, unescape
from losses import OBJECTIVES, with_options
from plumbing.parallel import devices
from plumbing.refusal import Refusal, refuse_os_errors
from session.checks import check_settings


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
}
PRESETS |= dict.fromkeys(("dapo", "dapo_paper"), dict(dynamic_sampling=True, overlong_cache=0.2))
PRESETS |= dict.fromkeys(("dppo", "dppo_kl", "rollout_is", "dro"),
                         dict(old_logp="sampler"))
for feature in FEATURES:
    PRESETS |= feature.presets
ALGORITHMS = {name: {"objective": name} | PRESETS.get(name, {})
              for name in dict.fromkeys([*OBJECTIVES, *PRESETS])}


@refuse_os_errors()
def read_object(text):
    """A JSON object as a word: NAME=VALUE, @FILE, or the object itself, which a recipe has."""
    try:
        if text[:1] not in ("@", "{"):
            name, _, value = text.partition("=")
            return {name: json.loads(value)}
        text = Path(text[1:]).read_text(encoding="utf-8") if text[0] == "@" else text
        return {**json.loads(text)}
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text}: NAME=VALUE, with a value as in JSON, or @FILE "
                                         "with a JSON object is needed") from None


@dataclass(frozen=True)
class Core:
    """The flags of the core, and what follows from them."""

    algorithm: str = flag(
        "gspo", "training algorithm: a row of losses.OBJECTIVES, or a preset that also sets other "
                "flags (docs/family.md)", section="the algorithm", choices=ALGORITHMS)
    epsilon: float | None = flag(
        None, "lower end of the clip range, 1 - epsilon; without --epsilon_high also the upper "
              "end, 1 + epsilon (default: the value of the algorithm's paper)", read=float)
    epsilon_high: float | None = flag(
        None, "upper end of the clip range, 1 + epsilon_high (default: the value of the "
              "algorithm's paper)", read=float)
    constants: dict = flag(
        {}, "constants of the algorithm's row in losses.OBJECTIVES, each NAME=NUMBER, such as "
            "tau_negative=3 (default: those of its paper)", read=read_object)
    dual_clip: float | None = flag(
        None, "drop the gradient of tokens with a negative advantage whose token ratio is above "
              "this value (1912.09729) (default: off)", above=1, read=float)
    off_policy_mask: float | None = flag(
        None, "drop responses with a negative advantage whose mean log-prob fell by more than "
              "this many nats (2512.02556) against the π_old of --old_logp; with sampler the "
              "mismatch counts, too (default: off)", above=0, read=float)
    reduction: str | None = flag(
        None, "how the loss is averaged over tokens (default: that of the algorithm's paper)",
        choices=("sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"))
    advantage: str = flag(
        "group", "how advantages are computed from rewards", choices=ADVANTAGES)
    scale_rewards: str = flag(
        "group", "divide advantages by the group's std (also: true, as in TRL), the batch's std, "
                 "or nothing (also: false)", choices=("group", "batch", "none"),
        read=lambda word: {"true": "group", "false": "none"}.get(word.lower(), word))

    old_logp: str = flag(
        "recompute", "recompute the old log-probs with a forward pass, or use the log-probs that "
                     "the sampler recorded", section="the sampler and the routers",
        choices=("recompute", "sampler"))
    sampler: str | None = flag(
        None, "what samples the rollouts: vllm (in the same process), or FILE.py:CLASS, your own "
              "class (docs/data.md#another-sampler) (default: the built-in sampler)")

    model_name_or_path: str | None = flag(
        None, "hub id or folder of a pretrained causal language model (default: a tiny MoE)",
        section="the policy")
    hidden_size: int = flag(96, "tiny MoE: width of the hidden states", at_least=1,
                            must=(lambda width: width % 8 == 0, "be a multiple of 8"))
    num_hidden_layers: int = flag(4, "tiny MoE: number of layers", at_least=1)
    num_experts: int = flag(8, "tiny MoE: experts per layer", at_least=1)
    num_experts_per_tok: int = flag(2, "tiny MoE: experts used per token", at_least=1)
    cold_start_steps: int = flag(
        320, "tiny MoE: optimizer steps of the supervised warm-up before RL", at_least=0)
    cold_start_learning_rate: float = flag(
        3e-3, "tiny MoE: learning rate of the supervised warm-up", above=0)

    dataset_name: str | None = flag(
        None, "problems: a hub id, or a .jsonl, .json, .csv or .parquet file (default: running "
              "sums)", section="the task", needs="model_name_or_path|environment")
    test_dataset_name: str | None = flag(
        None, "held-out problems (default: the test split of the dataset, or a part of it)",
        needs="dataset_name")
    columns: list[str] = flag(
        [], "names of the prompt column and of the answer column (default: prompt, question or "
            "problem; answer or solution)", needs="dataset_name|environment",
        must=(lambda names: len(names) <= 2, "be two names at most"))
    verifier: list[str] = flag(
        [], "what computes the reward: math (math-verify), exact or FILE.py:FUNCTION; the rewards "
            "of several functions are added (default: math)", needs="dataset_name|environment")
    verifier_timeout: float | None = flag(
        None, "time limit in seconds of a reward function of one response (default: 3)", above=0,
        needs="dataset_name|environment")
    reward_weights: list[float] = flag(
        [], "weights of the reward's components, in their order (default: 1 each)",
        needs="dataset_name|environment")
    chat_template: bool = flag(True, "use the tokenizer's chat template if it has one")
    chat_template_kwargs: dict = flag(
        {}, "a variable of the chat template as NAME=VALUE, such as enable_thinking=false, or "
            "@FILE with a JSON object (default: none)", needs="dataset_name|environment",
        read=read_object)
    system_prompt: str | None = flag(
        None, "system message before every prompt that has none of its own, or @FILE; without a "
              "chat template its text is put above the prompt (default: none)",
        needs="dataset_name|environment")
    prompt_template: str | None = flag(
        None, "text around every prompt, or @FILE, with {prompt} where the prompt goes: "
              "instructions, worked examples (default: the prompt alone)",
        needs="dataset_name|environment")
    stop: list[str] = flag(
        [], "strings that end a response; \\n stands for a line break (default: only the "
            "end-of-sequence token)", read=unescape, must=(all, "hold no empty text"))
    min_terms: int = flag(8, "built-in task: smallest number of terms of a sum", at_least=1)
    max_terms: int = flag(12, "built-in task: largest number of terms of a sum")
    verbose_answers: bool = flag(False, "built-in task: answers write every step as a+b=c")

    steps: int = flag(
        50, "number of rollout batches; a resumed run can be given more, which raises the learning "
            "rate of a cosine or linear schedule again",
        section="the rollout batch", at_least=1)
    prompts_per_step: int = flag(32, "prompts per rollout batch", at_least=1)
    num_generations: int = flag(
        8, "group size G: responses per prompt; at pass rate p a share p^G + (1-p)^G of the "
           "groups is all right or all wrong and teaches nothing", at_least=1)
    steps_per_generation: int = flag(
        4, "mini-batches per rollout batch, one optimizer step each", at_least=1)
    num_iterations: int = flag(
        1, "μ of GRPO: how often every mini-batch is used, in a new order each time; the old "
           "log-probs stay those of the policy that sampled", at_least=1)
    max_prompt_length: int = flag(1024, "longest prompt in tokens", at_least=1)
    max_completion_length: int | None = flag(
        None, "longest response in tokens (default: 256; for the built-in task, its longest "
              "answer)", at_least=1)
    temperature: float = flag(1.0, "temperature of sampling and of all log-probs", at_least=1e-6)

    learning_rate: float = flag(4e-4, "peak learning rate", section="the optimizer", above=0)
    lr_scheduler_type: str = flag(
        "cosine", "learning-rate schedule after warm-up",
        choices=("linear", "cosine", "constant_with_warmup"))
    warmup_steps: int = flag(10, "optimizer steps of linear learning-rate warm-up", at_least=0)
    optim: str = flag(
        "adamw_torch_fused", "AdamW of torch, or of bitsandbytes (pip install bitsandbytes) with "
                             "moments in 8 bits", choices=("adamw_torch_fused", "adamw_8bit"))
    weight_decay: float = flag(
        0.0, "AdamW's decoupled weight decay: each step also shrinks the weights by this share of "
             "the learning rate", at_least=0)
    max_grad_norm: float = flag(
        1.0, "clip the gradient norm at this value; 0: no clipping", at_least=0, read=float)

    micro_batch_size: int | None = flag(
        None, "responses per forward and backward pass; in 16 bits an upper limit, because all "
              "passes must have equal sizes (default: the whole mini-batch)", section="the machine",
        at_least=1)
    gradient_checkpointing: bool = flag(
        False, "save memory by recomputing activations in the backward pass; responses then share "
               "no computation")
    plain: bool = flag(
        False, "use the plain implementation, for reading and for comparison: one row per "
               "response and no shared computation")
    cuda_graphs: bool = flag(
        False, "on a CUDA GPU: replay the token steps of sampling as a CUDA graph",
        without={"plain": "", "sampler": ""})
    tf32: bool = flag(
        False, "on a CUDA GPU: compute float32 products on tensor cores, which round their "
               "factors to 11 bits (TF32)")
    bf16: bool | None = flag(
        None, "bfloat16 autocast; weights stay float32, but for the frozen ones of --use_peft "
              "(default: on for a checkpoint on a GPU that has bfloat16)")
    fp16: bool | None = flag(
        None, "float16 autocast with a gradient scaler; weights stay float32 (default: on for a "
              "checkpoint on a GPU without bfloat16)")
    device: str = flag(
        "auto", "device to compute on; auto: a CUDA GPU if there is one, else the CPU; mps (Apple "
                "GPUs) has not been tested on real hardware",
        choices=("auto", "cpu", "cuda", "mps"))
    shard: bool = flag(
        False, "with torchrun: shard the model with FSDP2 instead of keeping a full copy in every "
               "process")

    config: list[str] = flag(
        [], "YAML files of flags by their names, for example one of recipes/; a later file "
            "overrides an earlier one, and command-line flags override them (default: none)",
        section="the run")
    dry_run: bool = flag(
        False, "run one rollout batch and the longest update, and print their time and, on a GPU, "
               "their memory; no run folder is made", without="resume")
    output_dir: str | None = flag(
        None, "run folder (default: runs/<algorithm>, numbered if it exists)")
    resume: bool = flag(
        False, "continue the run in --output_dir from its last checkpoint", needs="output_dir")
    trust_run_code: bool = flag(
        False, "with --resume, and in eval.py: import every FILE.py:NAME that the run's "
               "config.json names; without this flag only those that are typed again")
    save_steps: int = flag(
        10, "number of rollout batches between checkpoints, of which the last two are kept; 0: "
            "save only at the end", at_least=0)
    save_tokens: bool | None = flag(
        None, "save one group's tokens per rollout batch for `eval.py view` (default: only for "
              "the tiny MoE)")
    eval_steps: int = flag(
        0, "number of rollout batches between evaluations; 0: evaluate only before and after "
           "training", at_least=0)
    eval_prompts: int = flag(256, "held-out prompts per evaluation", at_least=1)
    eval_samples: int = flag(
        4, "responses sampled per held-out prompt; 0: no evaluation", at_least=0)
    seed: int = flag(
        0, "random seed, which also decides what is held out", at_least=0, at_most=2 ** 28 - 1)

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
        """The objective's row with --constants and the two bounds beside its clip range."""
        return with_options(self.objective, dual_clip=self.dual_clip,
                            off_policy_mask=self.off_policy_mask,
                            constants=OBJECTIVES[self.objective].constants | self.constants)

    @property
    def router_shift(self):
        """Whether the objective's ratio contains RSPO's router shift."""
        return self.row.ratio == "log-shifted"

    @cached_property
    def autocast_dtype(self):
        """The format of autocast: torch.bfloat16, torch.float16, or None without autocast."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    @property
    def arithmetic(self):
        """The number format of forwards: "bfloat16", "float16", or "float32" without autocast."""
        return str(self.autocast_dtype or torch.float32).removeprefix("torch.")


# the last one's fields come first
FLAGS = [*(feature.flags for feature in FEATURES if feature.flags), Core]


@dataclass(frozen=True)
class Settings(*FLAGS):
    """What a run was asked to do, with all defaults filled in: the flags of the core and those of
    the features. Nothing changes it: what the data decide, such as the length limit of the built-in
    task, stands in the Task."""

    @property
    def features(self):
        """The classes of the features that are on."""
        return [feature for feature in FEATURES if feature.on(self)]


# Defaults for a checkpoint that differ from those of the tiny MoE: a smaller learning rate, smaller
# batches, a shorter warm-up, and fewer checkpoints, which are larger.
CHECKPOINT_DEFAULTS = dict(learning_rate=1e-6, prompts_per_step=8, steps_per_generation=2,
                           warmup_steps=5, save_steps=25)

NULL = "tag:yaml.org,2002:null"

# what a resumed run may change, besides the flags eval_…
CHANGEABLE = ("steps", "learning_rate", "save_steps", "report_to", "config", "output_dir", "resume",
              "trust_run_code")


# ------------------------------------------------------------------------------------- the layers

def parse(argv):
    """Command line -> Settings, with all defaults filled in and all values checked. Raises Refusal,
    or argparse's SystemExit, with one line."""
    typed = parse_flags(argv)
    layer = {}
    for file in typed.get("config", []):
        layer = merge(layer, read_recipe(file))
    typed = merge(layer, typed)
    if "resume" in typed and "output_dir" in typed:
        kept = read_run(typed["output_dir"])
        refuse_changes(kept, typed)
        refuse_code(kept, typed)
        settings = Settings(**kept | typed)
    else:
        settings = with_defaults(typed)
    check_settings(settings)
    return resolve(settings)


def with_defaults(typed):
    """The Settings of {flag: value}, with presets and defaults in place of what it lacks, without
    any check."""
    defaults = CHECKPOINT_DEFAULTS if "model_name_or_path" in typed else {}
    preset = ALGORITHMS[typed.get("algorithm", Settings.algorithm)]
    layer = {name: value for name, value in (defaults | preset).items()
             if name in Settings.__dataclass_fields__}  # lam is none without features/critic.py
    return Settings(**merge(layer, typed))


def refuse_changes(kept, typed):
    """Refuse typed flags that a resumed run may not change. kept: the flags with which it began."""
    for name, value in typed.items():
        if value != kept.get(name) and name not in CHANGEABLE and not name.startswith("eval_"):
            raise Refusal(f"--{name} {value}: this run has {kept.get(name)}, and --resume goes on "
                          "with that; leave it out, or begin another run")


def refuse_code(kept, typed):
    """Refuse to import and run a FILE.py:NAME that a run's config.json names, unless the typed
    flags name that flag, too, or trust_run_code."""
    for name, value in kept.items():
        if ".py:" in str(value) and name not in typed and not typed.get("trust_run_code"):
            raise Refusal(f"the run's config.json names code, --{name} {value}: if you trust it, "
                          "type that again, or add --trust_run_code")


def merge(layer, over):
    """The flags of two layers {flag: value}, of which the second decides. --epsilon without
    --epsilon_high is both ends of the clip range, so that it replaces both of the first."""
    if "epsilon" in over:
        layer = {name: value for name, value in layer.items() if name != "epsilon_high"}
    return layer | over


def resolve(settings):
    """The Settings with the values that follow from others in place of None."""
    row = OBJECTIVES[settings.objective]
    epsilon, high = row.clip_range(settings.epsilon, settings.epsilon_high)
    tokens = settings.save_tokens
    return replace(
        settings, epsilon=epsilon, epsilon_high=high,
        reduction=settings.reduction or row.reduction, **devices.choose_autocast(settings),
        save_tokens=not settings.model_name_or_path if tokens is None else tokens)


# -------------------------------------------------------------------------------------- the files

def read_recipe(path):
    """{flag: value} of the YAML file of --config. Its scalars are read as the text that was typed,
    as on a command line; null is a flag that is not given. A file that it names may stand beside
    it."""
    folder = Path(path).parent
    words = {}
    try:
        recipe = yaml.compose(Path(path).read_bytes())
        if not isinstance(recipe, yaml.MappingNode):
            raise Refusal("it must be a mapping of flags, such as steps: 50")
        for key, node in recipe.value:
            if key.value in words:
                raise Refusal(f"{key.value} is set twice")
            nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
            texts = [read_node(x) for x in nodes if node.tag != NULL]
            texts = [str(folder / text) if ".py:" in text
                     and (folder / text.rpartition(":")[0]).is_file() else text for text in texts]
            words[key.value] = [f"--{key.value}", *texts] if texts[1:] else [
                f"--{key.value}={text}" for text in texts]
        return parse_flags(sum(words.values(), []))
    except (OSError, yaml.YAMLError, Refusal) as error:
        raise Refusal(f"--config {path}: {' '.join(str(error).split())}") from None


def read_node(node):
    """The word of a value in a YAML file; a mapping, whose values have types, is one of JSON."""
    if isinstance(node, yaml.MappingNode):
        return json.dumps(yaml.safe_load(yaml.serialize(node)), default=str)
    if not isinstance(node, yaml.ScalarNode) or node.tag == NULL:
        raise Refusal("null, or a list, cannot stand in a list")
    return node.value


def read_run(folder):
    """{flag: value} of the run in a folder: its config.json."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise Refusal(f"{folder} is not the folder of a run: it has no config.json")
    kept = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in kept.items()      # a flag that has gone was off
            if value or name in Settings.__dataclass_fields__}


# ------------------------------------------------------------------------------- the command line

class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line."""

    def error(self, message):
        raise Refusal(message)


def parse_flags(argv):
    """{flag: value} of what stands on a command line."""
    return vars(make_parser().parse_args(argv))


def make_parser():
    """A flag per field of Settings, in sections."""
    parser = Parser(
        prog="train.py", usage="train.py [--flag value ...]", allow_abbrev=False,
        description="Train a tiny MoE or a pretrained model with GSPO or a related algorithm.")
    parser._negative_number_matcher = re.compile(r"-[\d.]")   # argparse's does not know -1e-3
    section = parser
    for f in fields(Settings):
        if "section" in f.metadata:
            section = parser.add_argument_group(f.metadata["section"])
        add_flag(section, f)
    return parser


class Join(argparse.Action):
    """Joins the objects of a flag, which may be given several times."""

    def __call__(self, parser, typed, objects, option_string=None):
        for names in objects:
            setattr(typed, self.dest, getattr(typed, self.dest, {}) | names)


def add_flag(section, f):
    """Add --name VALUE. A list or an object takes several values, and more where the flag is given
    again; a switch takes true, false or nothing. A flag that is not given leaves nothing behind."""
    kind = next(t for t in (*get_args(f.type), f.type) if t is not NoneType)     # X of X | None
    several = {list: "extend", dict: Join}.get(get_origin(f.type) or f.type)
    default = f.metadata.get("unset", getattr(Settings, f.name, None))
    if f.name in CHECKPOINT_DEFAULTS:
        default = f"{default}; for a checkpoint {CHECKPOINT_DEFAULTS[f.name]}"
    section.add_argument(
        f"--{f.name}", nargs="+" if several else "?" if kind is bool else None, action=several,
        const=True if kind is bool else None,
        type=f.metadata.get("read", {bool: boolean, float: finite}.get(kind, kind)),
        choices=f.metadata.get("choices"), default=argparse.SUPPRESS,
        help=f.metadata["help"] + (f" (default: {default})" if default else ""))


def boolean(text):
    """A switch as a word: true or false."""
    return ("false", "true").index(text.lower()) == 1


def finite(text):
    """A number as a word, neither infinite nor NaN. A flag for which infinity means that there is
    no bound has read=float."""
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)
