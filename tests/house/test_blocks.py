"""Every code block of every document: it runs, on two tiny models, or REASONS names why it does not.
python -m pytest -m slow tests/house/test_blocks.py

A block is what stands indented by four columns, or between ``` and ```. A block behind the name of a file (`mine.py`:) is that
file. Lines that begin with a program are commands; those of a document run in their order, in one folder, made short: a tiny model
for every checkpoint, few and short responses. The two models have one end token, and two, of which the tokenizer knows one.
"""

import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM

import eval
import train
from make_max_data import make_max_data
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model import cold_start as supervised
from plumbing.parallel import devices
from plumbing.run import metrics
from plumbing.run.arguments import parse
from rollout import end_tokens
from tools import dashboard, style, view  # noqa: F401  of this folder, not by the links of a test's
from tiny_run import TINY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md")))]
PROGRAM = re.compile(r"(OMP_NUM_THREADS=\d+ )?(python|torchrun|pip|tensorboard|for arm in|export) ")
FILE = re.compile(r".*`(\w+\.(?:py|jsonl|txt))`.*:$")  # the last one that a paragraph names
SHORT = ("--steps 2 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --max_completion_length 12 --eval_samples 1 "
         "--eval_prompts 2 --save_steps 0 --eval_steps 0 --max_prompt_length 4096 --device cpu").split()

# What is not run, by how the command begins or contains, and why. Every entry must still be needed.
REASONS = {
    "pip install": "installs packages",
    "python -m pytest": "the tests themselves",
    "openai/gsm8k": "a data set of the hub: only its flags are read",
    "recipes/gsm8k": "a data set of the hub: only its flags are read",
    "torchrun": "several processes or GPUs; tests/parallel starts them",
    "python gspo.py": "tests/concepts/test_gspo.py runs it",
    "python experiments/": "minutes to hours; tests/house/test_evidence.py makes a run again",
    "python benchmarks/": "minutes, or a GPU",
    "python eval.py claims": "tests/house/test_evidence.py judges from the results",
    "python tests/": "makes the checkpoint and its data, or simulates a GPU",
    "tensorboard --logdir": "a server",
    "--sampler vllm": "an environment of its own: tests/engines",
    "export JAIL": "a sandbox: tests/data/test_documented.py",
    "runs.py:passes": "a sandbox: tests/data/test_documented.py",
    "judge.py:judge": "a server: tests/data/test_documented.py",
    "--advantage over_median": "tests/concepts/test_learner.py writes the row and runs it",
    "--advantage fading": "tests/concepts/test_learner.py writes the row and runs it",
}


def blocks(document):
    """(line, the paragraph before it, its lines) of every code block."""
    found, before, paragraph, fenced, lines = [], "", "", False, (ROOT / document).read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            fenced = not fenced
            found += [(number, before, [])] if fenced else []
        elif fenced:
            found[-1][2].append(line)
        elif line.startswith("    ") and (not lines[number - 2].strip() or found and found[-1][0] == -1):
            found += [] if found and found[-1][0] == -1 else [(-1, before, [])]
            found[-1][2].append(line[4:])
        elif not line.strip() and found and found[-1][0] == -1:
            found[-1][2].append("")
        elif not line.strip():
            paragraph = ""
        else:
            found = [(number if n == -1 else n, *rest) for n, *rest in found]
            before = paragraph = f"{paragraph} {line}"
    return found


def pieces(document):
    """The document as ("file", name, text) and ("command", line, "") in its order; other blocks (formulas, rules, quotes) are left out."""
    found = []
    for _, before, lines in blocks(document):
        text = "\n".join(lines).rstrip().replace("\\\n", "")
        start = next((i for i, line in enumerate(text.split("\n")) if PROGRAM.match(line)), None)
        body, commands = text.split("\n")[:start], text.split("\n")[start:] if start is not None else []
        name = FILE.match(before)
        if name and "".join(body) and not (ROOT / name[1]).exists():
            found.append(("file", name[1], "\n".join(body).rstrip() + "\n"))
        found += [("command", line.split("   #")[0].strip(), "") for line in commands if PROGRAM.match(line)]
    return found


COMMANDS = [(document, line) for document in DOCUMENTS for kind, line, _ in pieces(document) if kind == "command"]


def reason(line):
    return next((why for what, why in REASONS.items() if what in line), None)


def test_every_reason_is_needed_and_every_document_with_commands_is_read():
    assert len(COMMANDS) > 30 and {document for document, _ in COMMANDS} >= {"README.md", "CONTRIBUTING.md", "docs/data.md"}
    assert [what for what in REASONS if not any(what in line for _, line in COMMANDS)] == []
    run = [line for _, line in COMMANDS if not reason(line)]
    assert len(run) >= 20 and all(line.startswith("python ") for line in run), run


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if re.search(r" train\.py |eval\.py passk", line) and reason(line)
                                         and not re.search("for arm|…|vllm", line)}))
def test_the_flags_of_a_command_that_is_not_run_are_read(line, monkeypatch):
    monkeypatch.setitem(devices.THERE, "mps", lambda: True)  # a Mac's command
    words = shlex.split(line.replace("$arm --seed $seed ", ""))
    if "passk" in words:
        from plumbing.run import commands
        commands.read(words[words.index("passk"):], "")
    elif not {"over_median", "fading"} & set(words):         # the examples of CONTRIBUTING.md, in no table
        parse(words[words.index("train.py") + 1:])


@pytest.fixture(params=["one end token", "two end tokens"])
def model(request, tmp_path, monkeypatch):
    """The folder of a tiny model whose tokenizer knows every character of the documents."""
    torch.manual_seed(0)
    characters = sorted({c for document in DOCUMENTS for c in (ROOT / document).read_text()})
    tokenizer = builtin_tokenizer([*characters, "<turn>"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<turn>|<eos>|[\s\S]"), "isolated")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    several = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<turn>")]
    policy = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer) + 8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, bos_token_id=None,
        intermediate_size=64, eos_token_id=several[0], pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False))
    with torch.no_grad():                                      # short responses, which end in one of them
        policy.model.norm.weight.fill_(0.1)
    if request.param == "two end tokens":
        policy.generation_config.eos_token_id = several
    policy.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def place(workplace, monkeypatch):
    """The current folder, with the repository's own folders within reach, and a look at every rollout batch that is trained on."""
    for name in ("features", "plumbing", "experiments", "recipes", "tests", "tools"):
        Path(name).symlink_to(ROOT / name)
    monkeypatch.setattr(supervised, "MUST_PASS", 0.0)
    monkeypatch.setattr(sys, "path", [str(workplace), str(ROOT), *sys.path])
    seen, log = SimpleNamespace(batches=0, ended=0), metrics.Recorder.log

    def checked(recorder, step, batch, *rest):
        rollout, learner = batch.rollout, recorder.learner
        ends = torch.tensor(end_tokens(learner.policy, learner.tokenizer))
        over = torch.isin(rollout.response_ids, ends) & rollout.mask                # [B, T]
        after = over.cumsum(-1) - over.long() > 0                                   # [B, T]
        assert not (after & rollout.mask).any(), "a token behind an end token is trained"
        seen.batches += 1
        seen.ended += int(over.any(-1).sum())
        return log(recorder, step, batch, *rest)
    monkeypatch.setattr(metrics.Recorder, "log", checked)
    return seen


def there(checkpoint, model):
    """The folder itself, the last checkpoint of the shortened run for one of a whole run, else the tiny model."""
    if Path(checkpoint).is_dir():
        return checkpoint
    step = re.fullmatch(r"(.*/checkpoints)/step_\d+", checkpoint)
    made = sorted(Path(step[1]).glob("step_*")) if step else []
    return str(made[-1]) if made else model


def shortened(flags, model):
    """The flags of train.py with a tiny model for every checkpoint, and with few and short responses."""
    flags = [there(value, model) if name.endswith("model_name_or_path") else value
             for name, value in zip(["", *flags], flags)]
    recipe = yaml.safe_load(Path(flags[flags.index("--config") + 1]).read_text()) if "--config" in flags else {}
    own = [] if any("model_name_or_path" in flag for flag in flags) else [*TINY]
    own = ["--model_name_or_path", model] if "model_name_or_path" in recipe else own
    stage = ["--stage2_step", "1"] if "--stage2_step" in flags else []
    folder = [] if "--output_dir" in flags else ["--output_dir", "runs/gspo", "--overwrite_output_dir"]
    if "--algorithm" in flags and folder:
        folder[1] = f"runs/{flags[flags.index('--algorithm') + 1]}"
    if folder and not Path(folder[1], "config.json").exists():
        folder.pop()
    return [*own, *flags, *SHORT, *stage, *folder]


def run(line, model):
    """Run a command, in this process where it is train.py, eval.py or a script that calls train.main."""
    _, *words = shlex.split(line)
    if words[0] == "-m":
        return subprocess.run([sys.executable, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    script, *flags = words
    if script == "train.py":
        return train.main(shortened(flags, model))
    if script == "eval.py":
        return eval.main([there(word, model) if "checkpoints/" in word else word for word in flags])
    with pytest.MonkeyPatch.context() as patch:
        trains = "import train" in Path(script).read_text()
        patch.setattr(train, "make_optimizer", train.make_optimizer)
        patch.setattr(sys, "argv", [script, *(shortened(flags, model) if trains else flags)])
        return runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(d == other and not reason(line) for other, line in COMMANDS)])
def test_the_commands_of_a_document_run(document, model, place, workplace, request):
    made = {"reverse.py", "reverse.jsonl"} if document == "docs/reading.md" else set()
    for name in ("mine.py", "mine.jsonl", "easy.jsonl", "hard.jsonl", *made):      # what the reader has: mentioned, not shown
        Path(name).write_text("def reward(response, answer):\n    return float(answer in response)\n" if name.endswith(".py") else
                              "".join(f'{{"prompt": "{i}+2=", "answer": "{i + 2}"}}\n' for i in range(20)))
    Path("data").mkdir()
    make_max_data(Path("data"))
    number, handlers = 0, {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for kind, line, text in pieces(document):
        if kind == "file":
            Path(line).write_text(text)
        elif kind == "command" and not reason(line):
            number += 1
            try:
                run(line, model)
            except SystemExit as stop:
                assert not stop.code, f"{document}: {line}"
            for s, handler in handlers.items():
                signal.signal(s, handler)
    assert number and (place.batches or "train.py" not in "".join(line for d, line in COMMANDS if d == document and not reason(line)))
    shutil.rmtree("runs", ignore_errors=True)
