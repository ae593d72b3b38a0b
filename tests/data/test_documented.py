"""What docs/data.md has a reader write: its files, as they stand there. python -m pytest tests/data/test_documented.py"""

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


def section(heading):
    """Write the files of a section of docs/data.md; returns its commands of train.py, each a list of words."""
    text = (ROOT / "docs/data.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    for name, body in re.findall(r"`(\S+\.\w+)`[^\n]*[:.]\n\n((?:    .*\n|\n)+)", text):
        lines = body.rstrip("\n").splitlines()
        assert not any(line.startswith("    python ") for line in lines), f"{name}: Markdown shows the command as a part of the file"
        Path(name).write_text("".join((line[4:] or "") + "\n" for line in lines).rstrip("\n") + "\n")
    return [shlex.split(line)[2:] for line in re.findall(r"^    (python train\.py .*)$", text, re.M)]


@pytest.fixture
def model(workplace, cold_start):
    return str(next(cold_start.iterdir()))


@pytest.fixture
def server(monkeypatch):
    """A server with a chat API that gives 7 of 10, and none to answers with a 3; notes the questions."""
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


def test_the_judge_that_asks_a_server(model, server):
    section("A reward in parts")                               # its rows.jsonl
    (argv,) = section("A reward function of TRL, a judge, a comparison within the group")
    argv[argv.index("DIR")] = model
    train.main([*SMALL, "--steps", "1", "--max_completion_length", "4", *argv, "--output_dir", "run"])
    record, = metrics("run")
    assert set(record["reward_parts"]) == {"exact", "judge"} and record["reward_parts"]["judge"] == pytest.approx(0.7)
    assert record["reward"] == pytest.approx(record["reward_parts"]["exact"] + 0.35, abs=0.2)
    questions = [question for question in server if "Answer: " in question]
    assert len(questions) == 16 + 2 and all(re.match(r"Question: \d\+\d=\nAnswer: ", q) for q in questions)


def test_the_comparison_within_a_group(workplace):
    section("A reward in parts")
    section("A reward function of TRL, a judge, a comparison within the group")
    task = load_task("rows.jsonl", verifier="rank.py:shortest")
    one, other = task.train
    texts = [f"  {one.answer} ", one.answer, "no", f"{one.answer} ", other.answer]
    assert task.judge(texts, [one] * 4 + [other]).flatten().tolist() == pytest.approx([2 / 3, 1, 0, 5 / 6, 1])


def test_the_verifier_that_runs_code(workplace, monkeypatch):
    monkeypatch.setenv("JAIL", f"{sys.executable} -I -")       # isolates nothing: no container here
    (argv,) = section("A verifier that runs code")
    task = from_arguments(parse(argv))
    problem = next(p for p in task.train + task.test if "add" in p.prompt)
    fenced = f"Here it is:\n```python\n{problem.answer}\n```\nDone."
    answers = [problem.answer, fenced, "def add(a, b):\n    return a - b", "import sys\nsys.exit(0)", "no code"]
    assert task.judge(answers, [problem] * 5).flatten().tolist() == [1, 1, 0, 0, 0]
    assert not task.verifier_errors and task.verifiers[0].time_limit == 20
    task.verifiers[0].close()
    monkeypatch.setenv("JAIL", "no-such-program")
    with pytest.raises(ValueError, match="runs.py:passes: raised FileNotFoundError.*each of the first"):
        from_arguments(parse(argv))


@pytest.mark.slow
def test_the_documented_sandbox_isolates_the_code(workplace, monkeypatch):
    """The documented JAIL of bubblewrap: right code passes; it reaches no file of the user's, writes none, has no network."""
    if not shutil.which("bwrap") or subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]).returncode:
        pytest.skip("bubblewrap is not installed, or may make no namespaces here")
    jail, = re.findall(r'^    export JAIL="(bwrap [^"]+)"$', (ROOT / "docs/data.md").read_text(), re.M)
    monkeypatch.setenv("JAIL", jail)
    (argv,) = section("A verifier that runs code")
    task = from_arguments(parse(argv))
    problem = next(p for p in task.train + task.test if "add" in p.prompt)
    mine = workplace / "mine.txt"
    mine.write_text("x")
    listener = socket.create_server(("127.0.0.1", 0))
    tries = [f"open({str(mine)!r})", f"open({str(Path(sys.prefix) / 'made')!r}, 'w')",
             f"__import__('socket').create_connection({listener.getsockname()}, 1)"]
    caught = "\nreached = True\ntry:\n    {}\nexcept OSError:\n    reached = False\nassert not reached\n"
    answers = [problem.answer, *(problem.answer + caught.format(line) for line in tries)]
    assert task.judge(answers, [problem] * 4).flatten().tolist() == [1, 1, 1, 1]
    assert not (Path(sys.prefix) / "made").exists()
    monkeypatch.setenv("JAIL", f"{sys.executable} -I -")       # the tries do reach what they try without a sandbox
    other = from_arguments(parse(argv))
    assert other.judge(answers, [problem] * 4).flatten().tolist() == [1, 0, 0, 0]
    (Path(sys.prefix) / "made").unlink()
    listener.close()
    task.verifiers[0].close()
    other.verifiers[0].close()


def test_the_calculator(workplace):
    argv = section("A tool")[0]
    task = from_arguments(parse(argv))
    assert task.prompt_template == "117+225=<tool>117+225</tool>342\n538+146=<tool>538+146</tool>684\n{prompt}"
    assert task.tool("3=<tool>1+1</tool> <tool> 2*(3-10) </tool>") == "-14" and task.tool.stop == "</tool>"
    assert task.tool("<tool>__import__('os')</tool>") == "error: only whole numbers with + - *"
    problem = task.train[0]
    right = f"<tool>{problem.prompt[:-1]}</tool>{problem.answer}"
    assert task.judge([right, right + "1", problem.answer], [problem] * 3).flatten().tolist() == [1, 0, 1]


@pytest.mark.checkpoint
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="python tests/make_smollm2.py makes it")
def test_smollm2_calls_the_calculator_and_the_page_shows_what_it_inserted(workplace):
    """The command of the page, on its rows, one rollout batch; then eval.py view."""
    argv = section("A tool")[0]
    argv[argv.index("--model_name_or_path") + 1] = str(SMOLLM2)
    small = "--steps 1 --prompts_per_step 2 --num_generations 4 --eval_samples 1 --device cpu --output_dir run".split()
    train.main([*argv, *small])
    record, = metrics("run")
    group = json.loads(Path("run/tokens.jsonl").read_text().splitlines()[0])
    holes = ["".join(t for t, own in zip(tokens, mask) if not own) for tokens, mask in zip(group["tokens"], group["mask"])]
    called = ["".join(tokens) for tokens, mask in zip(group["tokens"], group["mask"]) if 0 in mask]
    assert called and all("</tool>" in text for text in called)
    assert any(re.fullmatch(r"\d+|error: .*", hole) for hole in holes)
    assert record["mismatch_kl"] < 1e-5
    done = subprocess.run([sys.executable, ROOT / "eval.py", "view", "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.splitlines()[-1].split("   (")[0]).read_text()
    assert "inserted by a tool, not a loss token" in page


@pytest.mark.checkpoint
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="python tests/make_smollm2.py makes it")
def test_the_whole_task_on_smollm2(workplace, monkeypatch):
    """From free text to JSON: the rows, four rollout batches with a Ctrl-C after the second, --resume, the curves, and the
    merged checkpoint in transformers alone."""
    pytest.importorskip("peft")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (argv,) = section("A whole task: from free text to JSON")
    subprocess.run([sys.executable, "make_notes.py"], check=True)
    rows = [json.loads(line) for line in Path("notes.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 200 and all(set(json.loads(row["answer"])) == {"name", "city"} for row in rows)
    argv[argv.index("--model_name_or_path") + 1] = str(SMOLLM2)
    small = "--steps 4 --save_steps 1 --prompts_per_step 2 --num_generations 4 --eval_prompts 2 --eval_samples 1 --device cpu".split()
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
    records = metrics("runs/notes")
    assert [record["step"] for record in records] == [1, 2, 3, 4] and set(records[0]["reward_parts"]) == {"right", "form"}
    assert max(record["reward_parts"]["form"] for record in records) > 0, "no response was JSON: there is nothing to learn from"
    events = accumulator.EventAccumulator("runs/notes/tensorboard").Reload()
    assert [event.step for event in events.Scalars("reward_parts/form")] == [1, 2, 3, 4]
    merge = Path("merge.py").read_text().replace("step_40", "step_4").replace("checkpoints/SmolLM2-135M-Instruct", str(SMOLLM2))
    subprocess.run([sys.executable, "-c", merge], check=True)
    done = subprocess.run([sys.executable, "ask.py"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == {"name": "Hugo", "city": "Cairo"}, done.stdout + done.stderr


def test_the_reward_of_the_whole_task(workplace):
    (argv,) = section("A whole task: from free text to JSON")
    subprocess.run([sys.executable, "make_notes.py"], check=True)
    place = argv.index("--report_to")                        # its package is not needed for the reward
    task = from_arguments(parse(argv[:place] + argv[place + 2:]))
    problem, = [p for p in task.train + task.test if p.answer == '{"name": "Ana", "city": "Oslo"}'][:1]
    texts = [problem.answer, ' {"city": "Oslo", "name": "Ana"}', '{"name": "Ana", "city": "Rome"}', '{"name": "Ana"}', "Ana, Oslo", "3"]
    assert task.part_names == ["right", "form"] and len(task.train) + len(task.test) == 200
    assert task.judge(texts, [problem]).tolist() == [[1, 1], [1, 1], [0.5, 1], [0, 0], [0, 0], [0, 0]]
    task.verifiers[0].close()


def test_two_turns(workplace):
    (_, argv) = section("A tool")
    task = from_arguments(parse(argv))
    assert task.tool.stop == "\n" and task.tool("948\n") == "Sure? " and task.tool("948\nSure? 947\n") == ""
    answers = ["947\nSure? 948", "948\nSure? 947", "948\nSure? 948", "948", "948\n"]
    problem = next(p for p in task.train + task.test if p.answer == "948")
    assert task.judge(answers, [problem]).tolist() == [[1, 0], [0, 1], [1, 1], [0, 1], [0, 1]]
    task.verifiers[0].close()


def test_an_optimizer_and_a_tracker_of_ones_own(workplace, monkeypatch, capsys):
    """SGD goes on after a --resume with its momentum; the tracker reads what the run wrote."""
    section("An optimizer or a tracker of your own")
    monkeypatch.setattr(train, "make_optimizer", train.make_optimizer)         # sgd.py replaces it: put back afterwards

    def script(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(name, run_name="__main__")
    flags = [*TINY, "--steps", "2", "--lr_scheduler_type", "constant_with_warmup"]
    for more in ([], ["--steps", "3", "--resume"]):
        script("sgd.py", *flags, *more, "--output_dir", "sgd")
    capsys.readouterr()
    script("curve.py", "sgd")
    curve = capsys.readouterr().out
    state = torch.load("sgd/checkpoints/step_3/state.pt", weights_only=True)["optimizer"]["state"]
    assert {name for entry in state.values() for name in entry} == {"momentum_buffer"} and len(metrics("sgd")) == 3
    rows = [[float(x) for x in line.split(",")] for line in curve.splitlines()]
    assert rows == [[record[name] for name in ("step", "reward", "pass_rate", "loss")] for record in metrics("sgd")]


def test_a_curriculum(workplace, model, capsys):
    built_in, first, second = section("A curriculum")
    train.main([*TINY, *built_in, "--steps", "2", "--stage2_step", "1"])
    assert "problems of the second source join after 1 batches" in capsys.readouterr().out
    for argv in (first, second):
        argv[argv.index("--model_name_or_path") + 1] = model
        train.main([*SMALL, "--max_completion_length", "4", *argv, "--steps", "2", *(["--stage2_step", "1"] if argv is first else [])])
    assert "problems of the second source join after 1 batches" in capsys.readouterr().out
    prompts = {sample["prompt"] for line in Path("runs/stages/samples.jsonl").read_text().splitlines()[:1]
               for sample in json.loads(line)["samples"]}
    assert prompts and all(len(prompt) == 4 for prompt in prompts)
