"""docs/play.html trains as toy.py does: its first script, in node, beside toy.train.

    python -m pytest tests/tools/test_play.py
    python -m pytest tests/tools/test_play.py -m slow        its questions, in a headless chromium
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import toy

PAGE = Path(__file__).parents[2] / "docs/play.html"
CORE = re.search('<script id="core">(.*?)</script>', PAGE.read_text(encoding="utf-8"), re.S)[1]
BATCHES = 10
SEEDS = [1, 9]
PROGRAM = CORE + """
const {rule, length, learningRate, batches, seeds} = JSON.parse(process.argv[2]);
const arm = {...RULES[rule], rule, learningRate};
const setup = {prompts: 16, miniBatches: 4, optimizer: "adam"};
const draws = makeDraws(setup.prompts, length);
const rollout = makeRollout(setup.prompts, length);
const record = makeRecord(setup.prompts);
const out = {rates: [], chosen: [], logits: [], dropped: 0, signal: 0};
for (const seed of seeds) {
  const policy = makePolicy(seed);
  start(policy.logits, seed, length, 0.35);
  for (let batch = 0; batch < batches; batch++) {
    out.rates.push(exactPassRate(policy.logits, length));
    draw(draws, seed, batch);
    trainBatch(policy, draws, rollout, record, arm, setup);
    out.chosen.push([...rollout.chosen]);
  }
  out.logits.push([...policy.logits]);
  out.dropped += policy.dropped;
  out.signal += policy.signal;
}
console.log(JSON.stringify(out));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize("length", [8, 24, 240])
@pytest.mark.parametrize("rule, algorithm, clip", [
    ("grpo", "grpo", ()), ("gspo", "gspo", ()), ("wide", "gspo", (0.03, 0.04))])
def test_the_page_draws_every_digit_and_trains_every_number_as_toy_does(
        monkeypatch, rule, algorithm, clip, length):
    chosen = []
    draw = toy.draw

    def recorded(*arguments):
        batch = draw(*arguments)
        chosen.append(batch[0].view(len(SEEDS), -1) % 1000)                      # [S, B·L]
        return batch
    monkeypatch.setattr(toy, "draw", recorded)
    rates, clip_signal, logits = toy.train(
        algorithm, length, 0.2, *clip, batches=BATCHES, seeds=torch.tensor(SEEDS))
    arguments = dict(rule=rule, length=length, learningRate=0.2, batches=BATCHES, seeds=SEEDS)
    done = subprocess.run(["node", "-", json.dumps(arguments)], input=PROGRAM, text=True,
                          capture_output=True, check=True)
    page = json.loads(done.stdout)
    assert page["chosen"] == torch.stack(chosen, 1).flatten(0, 1).tolist()
    close = dict(atol=1e-7, rtol=0)
    for ours, theirs in ((page["rates"], rates), (page["logits"], logits)):
        torch.testing.assert_close(
            torch.tensor(ours, dtype=torch.float64).view(theirs.shape), theirs, **close)
    assert page["dropped"] / page["signal"] == pytest.approx(clip_signal)


def test_the_page_is_small_and_loads_nothing():
    assert PAGE.stat().st_size <= 64_000
    assert not re.search(r"\bsrc=|<link|https?://", PAGE.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("question, outcome", [
    (1, "behind"), (2, "like GSPO"), (3, "ahead"), (4, "no longer behind"), (5, "both")])
def test_the_answer_to_a_question_is_the_one_that_its_text_explains(browser, question, outcome):
    from selenium.webdriver.support.wait import WebDriverWait
    find = lambda css: browser.find_element("css selector", css)
    browser.get("about:blank")
    browser.get(f"{PAGE.as_uri()}#question={question}")
    find("#options button").click()
    WebDriverWait(browser, 60).until(lambda _: "You predicted" in find("#answer").text)
    assert find("#answer").text.startswith(f"It is “{outcome}”")
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_the_address_holds_the_setting(browser):
    address = (f"{PAGE.as_uri()}#length=240&miniBatches=8&prompts=32&passRate=0.5&firstSeed=9"
               "&optimizer=sgd&arm1=gspo_0.2_0.002&arm2=w_0.3_0&arm3=wide_0.1_0.05")
    browser.get("about:blank")
    browser.get(address)
    assert browser.current_url == address
