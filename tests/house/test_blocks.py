"""Every command of every document: it runs, on a tiny model, or REASONS names why it does not.
python -m pytest -m slow tests/house/test_blocks.py

The commands of a document run in their order, in one folder, made short: a tiny model for every
checkpoint, few and short responses. Their flags and files, run or not: test_documents.py.
"""

import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import eval
import models
import session.learner
import train
from documents import COMMANDS, DOCUMENTS, ROOT, pieces
from plumbing.data.running_sum import builtin_tokenizer
from session import metrics
from session.arguments import parse_flags, read_recipe
from tiny_run import TINY, jsonl, write
from tools import dashboard, style, view  # noqa: F401  of this folder, not by the links of a test's

SHORT = ("--steps 2 --prompts_per_step 4 --num_generations 4 --steps_per_generation 2 --device cpu "
         "--eval_samples 1 --eval_prompts 2 --save_steps 0 --eval_steps 0 --max_prompt_length 4096 "
         "--max_completion_length 12").split()

# What is not run, by what is in the command, and why. Every entry must still be needed.
REASONS = {
    "pip install": "installs packages",
    "python -m pytest": "the tests themselves",
    "openai/gsm8k": "a data set of the hub: only its flags are read",
    "recipes/gsm8k": "a data set of the hub: only its flags are read",
    "torchrun": "several processes or GPUs; tests/parallel starts them",
    "python gspo.py": "tests/concepts/test_gspo.py runs it",
    "python experiments/": "minutes to hours; tests/house/test_evidence.py makes a run again",
    "python experiments/run.py": "tests/house/test_evidence.py judges from the results",
    "python tests/": "makes the checkpoint and its data, or simulates a GPU",
    "--sampler vllm": "an environment of its own: tests/features/test_vllm_engine.py",
    "judge.py:judge": "a server: tests/data/test_documented.py",
    "--advantage maxrl": "tests/concepts/test_learner.py writes the row and runs it",
    "--imitation_coef": "tests/features/test_own_feature.py writes the file and runs it",
}
RUN = [(document, line) for document, line in COMMANDS if not any(what in line for what in REASONS)]


def test_every_reason_is_needed_and_every_document_with_commands_is_read():
    read = {name for name, _ in COMMANDS}
    assert read >= {"README.md", ".github/CONTRIBUTING.md", "docs/data.md"}
    assert len(COMMANDS) > 30
    assert not [what for what in REASONS if not any(what in line for _, line in COMMANDS)]
    assert len(RUN) >= 20 and all(line.startswith("python ") for _, line in RUN), RUN


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny model whose tokenizer knows every character of the documents."""
    tokenizer = builtin_tokenizer([*sorted({*"".join(DOCUMENTS.values())})])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    return models.saved(tmp_path / "tiny", "qwen2", tokenizer, num_hidden_layers=1,
                        vocab_size=256)


@pytest.fixture
def batches(workplace, monkeypatch, first):
    """The numbers of the rollout batches that are trained on, in the current folder, which has the
    repository's own within reach."""
    for name in ("features", "plumbing", "session", "experiments", "recipes", "tests", "tools"):
        Path(name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "path", [str(workplace), str(ROOT), *sys.path])
    seen = []
    first(metrics.Recorder, "log", lambda recorder, step, *rest: seen.append(step))
    return seen


def there(checkpoint, model):
    """The folder itself, the last checkpoint of the shortened run for one of a whole run, else the
    tiny model."""
    made = sorted(Path(checkpoint).parent.glob("step_*"))
    return checkpoint if Path(checkpoint).is_dir() else str(made[-1]) if made else model


def shortened(words, model):
    """Flags of train.py with a tiny model for every checkpoint, and few and short responses. Of a
    flag that is given twice the second decides."""
    typed = parse_flags(words)
    for file in typed.get("config", []):
        typed = read_recipe(file) | typed
    own = TINY
    if "environment" in typed:
        own = ["--cold_start_steps", "5"]                    # a game has its own prompts
    if "model_name_or_path" in typed:
        own = ["--model_name_or_path", there(typed["model_name_or_path"], model)]
    return [*words, *own, *SHORT]


def run(line, model):
    """Run a command, in this process where it is train.py, eval.py or a script of training."""
    _, *words = shlex.split(line)
    if words[0] in ("-m", "-c"):
        return subprocess.run([sys.executable, *words], check=True, cwd=ROOT,
                              stdout=subprocess.DEVNULL)
    script, *flags = words
    if script == "train.py":
        return train.main(shortened(flags, model))
    if script == "eval.py":
        return eval.main([there(word, model) if "checkpoints/" in word else word for word in flags])
    with pytest.MonkeyPatch.context() as patch:
        trains = "import train" in Path(script).read_text(encoding="utf-8")
        patch.setattr(session.learner, "make_optimizer", session.learner.make_optimizer)
        patch.setattr(sys, "argv", [script, *(shortened(flags, model) if trains else flags)])
        return runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("document", dict.fromkeys(document for document, _ in RUN))
def test_the_commands_of_a_document_run(document, model, batches):
    made = ["repeat.py", "repeat.jsonl"] * (document == "docs/exercises/README.md")
    for name in ("mine.py", "mine.jsonl", *made):      # not shown
        if name.endswith(".py"):
            write(name, "def reward(response, answer):\n"
                        "    return float(answer in response)\n\n\nrepaired = reward\n")
        else:
            jsonl(name, [{"prompt": f"{i}+2=", "answer": str(i + 2)} for i in range(20)])
    subprocess.run([sys.executable, ROOT / "tests/make_max_data.py", "data"], check=True)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for kind, line, text in pieces(document):
        if kind == "file":
            write(line, text)
        elif line.endswith("&& python train.py"):                    # after pip install
            run("python train.py", model)
        elif (document, line) in RUN:
            try:
                run(line, model)
            except SystemExit as stop:
                assert not stop.code, f"{document}: {line}"
            for s, handler in handlers.items():
                signal.signal(s, handler)
    assert batches or not any("train.py" in line for name, line in RUN if name == document)
