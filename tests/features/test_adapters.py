"""The adapters of recipes/adapters.py, in runs whose turns a script writes.
python -m pytest tests/features/test_adapters.py"""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import models
import train
from chat_server import chat_server
from tiny_run import jsonl, read_json, write

ROOT = Path(train.__file__).parent
ADAPTERS = ROOT / "recipes/adapters.py"
# As Qwen's: tools in the system message, results that follow each other in one message.
HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SAYS = """
import re
from plumbing.engines.responses import as_rollout


class Says:
    def __init__(self, policy, tokenizer, *settings):
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop = ()

    def sample(self, prompts, group_size, uniforms=None, temperature=None):
        read = ["".join(self.tokenizer.convert_ids_to_tokens(ids)) for ids in prompts]
        turns = [write_turn(text) + "<|im_end|>" for text in read for _ in range(group_size)]
        ids = self.tokenizer(turns, add_special_tokens=False)["input_ids"]
        return as_rollout(self.policy, self.tokenizer, prompts, group_size, ids,
                          [[-1.0] * len(row) for row in ids])


def call(name, **arguments):
    return f'<tool_call>\\n{{"name": "{name}", "arguments": {arguments}}}\\n</tool_call>'.replace(
        "'", '"')


def write_turn(read):
"""


@pytest.fixture
def games(run):
    """games(name, body, flags) -> the samples of a run with this adapter, two batches long, whose
    turns write_turn(read) writes; body: of that function."""
    models.saved("model", tokenizer=models.chat_tokenizer(HERMES))

    def play(name, body, flags="", group=2):
        write("says.py", SAYS + body)
        run(f"--model_name_or_path model --environment {ADAPTERS}:{name} --sampler says.py:Says "
            f"--max_completion_length 900 --max_prompt_length 2000 --steps 2 --save_tokens "
            f"--prompts_per_step 2 --num_generations {group} --steps_per_generation 1 {flags}")
        return [sample for line in read_json("run/samples.jsonl") for sample in line["samples"]]
    return play


def schemas(name):
    """The flag with the file of schemas that the documented command writes."""
    subprocess.run([sys.executable, ADAPTERS, name, "tools.json"], check=True)
    return "--chat_template_kwargs @tools.json"


def rendered(sample, tools):
    """The sample's conversation as the template writes it, each result in a message of its own."""
    chat = [{"role": "user", "content": sample["prompt"]}]
    for turn in sample["turns"]:
        parts = turn["content"].split("\n</tool_response>\n<tool_response>\n")
        chat += [{"role": turn["role"], "content": part} for part in parts]
    return models.chat_tokenizer(HERMES).apply_chat_template(chat, tokenize=False, tools=tools)


def test_several_tool_calls_of_a_turn_are_answered_as_the_template_writes_it(games):
    flag = schemas("Calculator")
    samples = games("Calculator", """
    first, second, third = re.search(r"(\\d+)\\+(\\d+)\\+(\\d+)=", read).groups()
    results = re.findall(r"<tool_response>\\n(.*?)\\n", read)
    if not results:
        calls = [call("add", a=first, b=second), call("lose", a=1), "<tool_call>{}</tool_call>"]
        return "I add." + "".join(calls)
    return call("add", a=int(results[0]), b=third) if len(results) == 3 else results[-1]
""", flag)
    tools = read_json("tools.json")["tools"]
    assert tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    for sample in samples:
        a, b, c = map(int, re.findall(r"\d+", sample["prompt"]))
        writes, reads, again, result, answer = [turn["content"] for turn in sample["turns"]]
        wrong = "\n</tool_response>\n<tool_response>\nerror: KeyError("
        assert reads == f"{a + b}{wrong}'lose'){wrong}'name')" and result == str(a + b + c)
        assert sample["turn_rewards"] == [0, 0, 1] and sample["reward"] == 1
        assert {turn["role"] for turn in sample["turns"][1::2]} == {"tool"}
    group = read_json("run/tokens.jsonl")[-1]
    sample = next(s for s in samples if s["prompt"] in group["prompt"])
    whole = group["prompt"] + "".join(group["tokens"][0])
    assert "Add two numbers." in group["prompt"]
    assert whole + "\n" == rendered(sample, tools) and sample["prompt"] in whole


def test_a_class_for_trls_environment_factory_plays_as_it_is(games):
    """Its reset opens the prompt, its public methods are the tools, it gives the reward."""
    samples = games("FromTRL", """
    target = int(re.search("Count to (\\\\d+)", read)[1])
    results = re.findall(r"<tool_response>\\n(.*?)\\n", read)
    if len(results) == 4:
        return "Done."
    return call("increase", by=target - 5 if not results else 5) + call("get_reward")
""", schemas("FromTRL"))
    for sample in samples:
        target = int(sample["prompt"].removeprefix("Use the counter.\nCount to ").rstrip("."))
        first, second = (turn["content"] for turn in sample["turns"][1::2])
        assert first.startswith(f"{target - 5}\n") and "error: KeyError('get_reward')" in first
        assert second.startswith(f"{target}\n") and sample["reward"] == 1


def test_a_class_with_gymnasiums_reset_and_step(games):
    samples = games("FromGym", """
    places = re.findall(r"You are at (-?\\d+)", read)
    if not places[1:]:
        return "right" if "Write left or right.<" in read.replace("user\\nGo", "") else "jump"
    return "left" if min(map(int, places)) < 0 else "right"
""")
    starts = set()
    for sample in samples:
        assert sample["prompt"] == "Go to 3. Write left or right. You are at 0."
        writes = [turn["content"] for turn in sample["turns"][::2]]
        reads = [turn["content"] for turn in sample["turns"][1::2]]
        assert writes[:2] == ["jump", "right"] and reads[0] == "Write left or right."
        assert sample["reward"] == sample["turn_rewards"][-1] == 1
        starts.add(reads[1])
    assert starts == {" You are at 1.", " You are at -1."}               # by the seed of a prompt


@pytest.fixture
def examiners(monkeypatch):
    """A server with OpenAI's chat API, which asks once more and is then content; notes how many
    questions it has at a time."""
    busy = [0]
    lock = threading.Lock()

    def answer(messages):
        with lock:
            busy.append(busy[-1] + 1)
        time.sleep(0.05)
        with lock:
            busy.append(busy[-1] - 1)
        return "Why?" if len(messages) == 2 else "RIGHT"
    with chat_server(answer) as address:
        monkeypatch.setenv("JUDGE", address)
        yield busy


def test_the_examiners_of_a_batch_share_a_client_and_its_slots(games, examiners):
    """Of all batches; at most eight questions are asked at a time."""
    openai = pytest.importorskip("openai")
    made = []
    inner = openai.AsyncOpenAI.__init__

    def noted(self, **options):
        made.append(options)
        inner(self, **options)
    jsonl("rows.jsonl", [{"prompt": f"The number {i}."} for i in range(20)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai.AsyncOpenAI, "__init__", noted)
        samples = games("Examiner", "    return 'Because.'\n", "--dataset_name rows.jsonl", 8)
    for sample in samples:
        assert [turn["content"] for turn in sample["turns"]] == ["Because.", "Why?", "Because."]
        assert sample["turn_rewards"] == [0, 1]
    assert len(made) == 1 and max(examiners) == 8


def test_a_file_of_schemas_that_is_not_there_or_no_object_is_refused(own, refused):
    for text, words in ((None, "@tools.json: cannot be read: [Errno 2]"), ("[]", "a JSON object"),
                        ("{", "a JSON object")):
        if text:
            write("tools.json", text)
        said = refused(f"{own} --chat_template_kwargs @tools.json")
        assert "--chat_template_kwargs @tools.json" in said and words in said, said


