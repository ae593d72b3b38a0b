"""What docs/data.md has a reader write: its files, as they stand there.
python -m pytest tests/data/test_documented.py"""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

import train
from plumbing.data.tasks import from_arguments, load_task
from plumbing.run.arguments import parse
from plumbing.run.metrics import Recorder
from tiny_run import SMALL, TINY, metrics

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "checkpoints/SmolLM2-135M-Instruct"
DATA = (ROOT / "docs/data.md").read_text()


def section(heading, **places):
    """Write the files of a section of docs/data.md; its commands of train.py, each a list of words,
    with other words in these places."""
    text = DATA.split(f"## {heading}\n")[1].split("\n## ")[0]
    for name, body in re.findall(r"`(\S+\.\w+)`[^\n]*[:.]\n\n((?:    .*\n|\n)+)", text):
        lines = body.rstrip("\n").splitlines()
        assert not any(line.startswith("    python ") for line in lines), (
            f"{name}: Markdown shows the command as a part of the file")
        Path(name).write_text("".join(line[4:] + "\n" for line in lines).rstrip("\n") + "\n")
    commands = re.findall(r"^    (python train\.py .*)$", text, re.M)
    return [[places.get(word, word) for word in shlex.split(line)[2:]] for line in commands]


def judged(task, texts, problems):
    """The rewards of the texts; the task's workers are closed."""
    rewards = task.judge(texts, problems).squeeze(-1).tolist()
    assert not task.verifier_errors
    for verifier in task.verifiers:
        verifier.close()
    return rewards


def asked(task, words):
    """The first problem of a task whose prompt or answer has these words."""
    return next(p for p in task.train + task.test if words in p.prompt or words == p.answer)


@pytest.fixture
def server(monkeypatch):
    """A server with a chat API that gives 7 of 10, and none to answers with a 3; notes the
    questions."""
    asked = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body["messages"][0]["content"])
            if "3" in asked[-1].split("Answer: ")[1].split("\n")[0]:
                return self.send_error(500)
            reply = json.dumps({"choices": [{"message": {"content": "I say 7."}}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *words):
            pass
    server = HTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()


JUDGES = "A reward function of TRL, a judge, a comparison within the group"
SHORT = [*SMALL, "--max_completion_length", "4"]


def test_a_reward_in_parts(model, capsys):
    (argv,) = section("A reward in parts", DIR=model)
    train.main([*SHORT, "--steps", "2", *argv, "--output_dir", "run"])
    first, second = metrics("run")
    assert set(first["reward_parts"]) == {"right", "digit", "small"}
    assert second["verifier_errors"] == 0 and "right" in capsys.readouterr().out


def test_the_judge_that_asks_a_server(model, server):
    section("A reward in parts")                             # its rows.jsonl
    (argv,) = section(JUDGES, DIR=model)
    train.main([*SHORT, "--steps", "1", *argv, "--output_dir", "run"])
    record, = metrics("run")
    parts = record["reward_parts"]
    assert set(parts) == {"exact", "judge"} and parts["judge"] == pytest.approx(0.7)
    assert record["reward"] == pytest.approx(parts["exact"] + 0.35, abs=0.2)
    questions = [question for question in server if "Answer: " in question]
    assert len(questions) == 16 + 2
    assert all(re.match(r"Question: \d\+\d=\nAnswer: ", question) for question in questions)


def test_the_comparison_within_a_group(workplace):
    section("A reward in parts")
    section(JUDGES)
    task = load_task("rows.jsonl", verifier="rank.py:shortest")
    one, other = task.train
    texts = [f"  {one.answer} ", one.answer, "no", f"{one.answer} ", other.answer]
    want = [2 / 3, 1, 0, 5 / 6, 1]
    assert judged(task, texts, [one] * 4 + [other]) == pytest.approx(want)


OUTSIDE = f"{sys.executable} -I -"                           # isolates nothing: no container here


def test_the_verifier_that_runs_code(workplace, monkeypatch):
    monkeypatch.setenv("JAIL", OUTSIDE)
    (argv,) = section("A verifier that runs code")
    task = from_arguments(parse(argv))
    problem = asked(task, "add")
    fenced = f"Here it is:\n```python\n{problem.answer}\n```\nDone."
    answers = [problem.answer, fenced, "def add(a, b):\n    return a - b",
               "import sys\nsys.exit(0)", "no code"]
    assert judged(task, answers, [problem] * 5) == [1, 1, 0, 0, 0]
    assert task.verifiers[0].time_limit == 20
    monkeypatch.setenv("JAIL", "no-such-program")
    words = "runs.py:passes: raised FileNotFoundError.*each of the first"
    with pytest.raises(ValueError, match=words):
        from_arguments(parse(argv))


def bubblewrap():
    try:
        done = subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"])
        return done.returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_the_documented_sandbox_isolates_the_code(workplace, monkeypatch):
    """The documented JAIL of bubblewrap: right code passes; it reaches no file of the user's,
    writes none, has no network. Without a sandbox, the tries do reach what they try."""
    if not bubblewrap():
        pytest.skip("bubblewrap is not installed, or may make no namespaces here")
    jail, = re.findall(r'^    export JAIL="(bwrap [^"]+)"$', DATA, re.M)
    (argv,) = section("A verifier that runs code")
    mine, made = workplace / "mine.txt", Path(sys.prefix) / "made"
    mine.write_text("x")
    caught = ("\nreached = True\ntry:\n    {}\nexcept OSError:\n    reached = False\n"
              "assert not reached\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tries = [f"open({str(mine)!r})", f"open({str(made)!r}, 'w')",
                 f"__import__('socket').create_connection({listener.getsockname()}, 1)"]
        for program, want in ((jail, [1, 1, 1, 1]), (OUTSIDE, [1, 0, 0, 0])):
            monkeypatch.setenv("JAIL", program)
            task = from_arguments(parse(argv))
            right = asked(task, "add")
            answers = [right.answer, *(right.answer + caught.format(line) for line in tries)]
            assert judged(task, answers, [right] * 4) == want
            assert made.exists() == (program == OUTSIDE)
    made.unlink()


def test_the_calculator(workplace):
    argv = section("A tool")[0]
    task = from_arguments(parse(argv))
    assert task.prompt_template == ("117+225=<tool>117+225</tool>342\n"
                                    "538+146=<tool>538+146</tool>684\n{prompt}")
    assert task.tool.stop == "</tool>"
    assert task.tool("3=<tool>1+1</tool> <tool> 2*(3-10) </tool>") == "-14"
    assert task.tool("<tool>__import__('os')</tool>") == "error: only whole numbers with + - *"
    problem = task.train[0]
    right = f"<tool>{problem.prompt[:-1]}</tool>{problem.answer}"
    assert judged(task, [right, right + "1", problem.answer], [problem] * 3) == [1, 0, 1]


def smollm2(heading):
    """The first command of a section, with the checkpoint that is here."""
    argv = section(heading)[0]
    argv[argv.index("--model_name_or_path") + 1] = str(SMOLLM2)
    return argv


needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(),
                                   reason="python tests/make_smollm2.py makes it")


@pytest.mark.checkpoint
@needs_smollm2
def test_smollm2_calls_the_calculator_and_the_page_shows_what_it_inserted(workplace):
    """The command of the page, on its rows, one rollout batch; then eval.py view."""
    small = ("--steps 1 --prompts_per_step 2 --num_generations 4 --eval_samples 1 --device cpu "
             "--output_dir run").split()
    train.main([*smollm2("A tool"), *small])
    record, = metrics("run")
    group = json.loads(Path("run/tokens.jsonl").read_text().splitlines()[0])
    rows = [*zip(group["tokens"], group["mask"])]
    holes = ["".join(t for t, own in zip(tokens, mask) if not own) for tokens, mask in rows]
    called = ["".join(tokens) for tokens, mask in rows if 0 in mask]
    assert called and all("</tool>" in text for text in called)
    assert any(re.fullmatch(r"\d+|error: .*", hole) for hole in holes)
    assert record["mismatch_kl"] < 1e-5
    done = subprocess.run([sys.executable, ROOT / "eval.py", "view", "run"], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.splitlines()[-1].split("   (")[0]).read_text()
    assert "inserted by a tool, not a loss token" in page


NOTES = "A whole task: from free text to JSON"


@pytest.mark.checkpoint
@needs_smollm2
def test_the_whole_task_on_smollm2(workplace, monkeypatch):
    """From free text to JSON: the rows, four rollout batches with a Ctrl-C after the second,
    --resume, the curves, and the merged checkpoint in transformers alone."""
    pytest.importorskip("peft")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    argv = smollm2(NOTES)
    subprocess.run([sys.executable, "make_notes.py"], check=True)
    rows = [json.loads(line) for line in Path("notes.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 200
    assert all(set(json.loads(row["answer"])) == {"name", "city"} for row in rows)
    small = ("--steps 4 --save_steps 1 --prompts_per_step 2 --num_generations 4 --eval_prompts 2 "
             "--eval_samples 1 --device cpu").split()
    log = Recorder.log

    def interrupted(recorder, step, *rest):
        log(recorder, step, *rest)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(Recorder, "log", interrupted)
        train.main([*argv, *small])
    assert stop.value.code == 130 and len(metrics("runs/notes")) == 2
    train.main([*argv, *small, "--resume"])
    parts = [(record["step"], record["reward_parts"]) for record in metrics("runs/notes")]
    assert [step for step, _ in parts] == [1, 2, 3, 4] and set(parts[0][1]) == {"right", "form"}
    assert max(part["form"] for _, part in parts) > 0, "no response was JSON: nothing to learn from"
    events = accumulator.EventAccumulator("runs/notes/tensorboard").Reload()
    assert [event.step for event in events.Scalars("reward_parts/form")] == [1, 2, 3, 4]
    merge = Path("merge.py").read_text().replace("step_40", "step_4")
    merge = merge.replace("checkpoints/SmolLM2-135M-Instruct", str(SMOLLM2))
    subprocess.run([sys.executable, "-c", merge], check=True)
    done = subprocess.run([sys.executable, "ask.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "Hugo", "city": "Cairo"}


def test_the_reward_of_the_whole_task(workplace):
    (argv,) = section(NOTES)
    subprocess.run([sys.executable, "make_notes.py"], check=True)
    place = argv.index("--report_to")                        # its package is not needed here
    task = from_arguments(parse(argv[:place] + argv[place + 2:]))
    problem = asked(task, '{"name": "Ana", "city": "Oslo"}')
    texts = [problem.answer, ' {"city": "Oslo", "name": "Ana"}', '{"name": "Ana", "city": "Rome"}',
             '{"name": "Ana"}', "Ana, Oslo", "3"]
    assert task.part_names == ["right", "form"] and len(task.train) + len(task.test) == 200
    assert judged(task, texts, [problem]) == [[1, 1], [1, 1], [0.5, 1], [0, 0], [0, 0], [0, 0]]


def test_two_turns(workplace):
    (_, argv) = section("A tool")
    task = from_arguments(parse(argv))
    assert task.tool.stop == "\n" and task.tool("948\n") == "Sure? "
    assert task.tool("948\nSure? 947\n") == ""
    answers = ["947\nSure? 948", "948\nSure? 947", "948\nSure? 948", "948", "948\n"]
    want = [[1, 0], [0, 1], [1, 1], [0, 1], [0, 1]]
    assert judged(task, answers, [asked(task, "948")]) == want


def test_an_optimizer_and_a_tracker_of_ones_own(workplace, monkeypatch, capsys):
    """SGD goes on after a --resume with its momentum; the tracker reads what the run wrote."""
    section("An optimizer or a tracker of your own")
    monkeypatch.setattr(train, "make_optimizer", train.make_optimizer)   # sgd.py replaces it

    def script(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(name, run_name="__main__")
    flags = [*TINY, "--lr_scheduler_type", "constant_with_warmup", "--output_dir", "sgd"]
    script("sgd.py", *flags, "--steps", "2")
    script("sgd.py", *flags, "--steps", "3", "--resume")
    capsys.readouterr()
    script("curve.py", "sgd")
    curve = capsys.readouterr().out
    state = torch.load("sgd/checkpoints/step_3/state.pt", weights_only=True)["optimizer"]["state"]
    assert {name for entry in state.values() for name in entry} == {"momentum_buffer"}
    rows = [[float(x) for x in line.split(",")] for line in curve.splitlines()]
    assert len(rows) == 3 and rows == [
        [record[name] for name in ("step", "reward", "pass_rate", "loss")]
        for record in metrics("sgd")]


def test_a_curriculum(model, capsys):
    built_in, first, second = section("A curriculum")
    joins = "problems of the second source join after 1 batches"
    train.main([*TINY, *built_in, "--steps", "2", "--stage2_step", "1"])
    assert joins in capsys.readouterr().out
    for argv in ([*first, "--stage2_step", "1"], second):
        argv[argv.index("--model_name_or_path") + 1] = model
        train.main([*SHORT, *argv, "--steps", "2"])
    assert joins in capsys.readouterr().out
    samples = json.loads(Path("runs/stages/samples.jsonl").read_text().splitlines()[0])["samples"]
    assert samples and all(len(sample["prompt"]) == 4 for sample in samples)
