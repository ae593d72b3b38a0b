"""An adapter's checkpoint computes what was trained: train, save, load, equal, over {tied, untied} x
{base model, adapter's checkpoint} x {4 bits, not}. python -m pytest tests/model/test_adapter_checkpoints.py

References: the policy in memory at the end of the run; transformers and peft, which read the same folder.
"""

import itertools
import json
import random
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.adapters import merged
from plumbing.model.policy import load_policy
from plumbing.engines.samplers import sampling_copy
from plumbing.run.arguments import parse
from tiny_run import SMALL, differences, metrics

TOKENIZER = builtin_tokenizer()
IDS = torch.tensor([[1, 10, 2, 11, 3, 12]])
MODULES = ["--lora_target_modules", "q_proj", "down_proj", "lm_head"]
CASES = list(itertools.product(("tied", "untied"), ("base", "adapter"), ("plain", "4bit")))
QUICK = {("tied", "adapter", "plain"), ("untied", "adapter", "4bit")}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a tied and an untied dense model, rows and a verifier whose rewards are a matter of chance."""
    pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM
    monkeypatch.chdir(tmp_path)
    ends = dict(bos_token_id=None, eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id)
    for name in ("tied", "untied"):
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(
            vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=128, initializer_range=0.1, tie_word_embeddings=name == "tied", **ends)).save_pretrained(name)
        TOKENIZER.save_pretrained(name)
    rng = random.Random(0)
    prompts = ["+".join(rng.choice("123456789") for _ in range(rng.randint(1, 5))) + "=" for _ in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in dict.fromkeys(prompts)))
    Path("mine.py").write_text("def reward(response, answer):\n    return sum(map(ord, response)) % 3 / 2\n")
    return tmp_path


def flags(model, *more):
    return [*SMALL, "--model_name_or_path", model, "--dataset_name", "rows.jsonl", "--verifier", "mine.py:reward", "--use_peft", *MODULES,
            "--lora_r", "4", "--max_completion_length", "8", "--learning_rate", "0.02", "--warmup_steps", "0", *more]


def run(model, name, *more):
    """The logits of the policy before the first batch and at the end of a run of train.main."""
    seen, loop = [], train.train

    def watched(args, learner, *others):
        seen.append(learner.policy(input_ids=IDS).logits.detach())
        result = loop(args, learner, *others)
        seen.append(learner.policy(input_ids=IDS).logits.detach())
        return result
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", watched)
        train.main(flags(model, "--steps", "2", "--output_dir", name, *more))
    return seen


def loaded(folder, *more):
    """The logits of a checkpoint as eval.py passk, --teacher_model_name_or_path and full fine-tuning load it."""
    policy, _ = load_policy(replace(parse(flags(str(folder), *more)), use_peft=False), None, torch.device("cpu"))
    assert policy.name_or_path == str(folder)
    return policy(input_ids=IDS).logits.detach()


def close(one, other):
    torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("tied, start, bits", [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES])
def test_trained_saved_loaded_equal(tied, start, bits, place):
    more = ["--load_in_4bit"] if bits == "4bit" else []
    if more:
        pytest.importorskip("bitsandbytes")
    model = tied
    if start == "adapter":
        _, end = run(model, "first", *more)
        model = "first/checkpoints/step_2"
    begin, final = run(model, "second", *more)
    if start == "adapter":                                   # the run begins where the first one ended
        close(begin, end)
    assert (final - begin).abs().max() > 0.01                # and learns
    folder = Path("second/checkpoints/step_2")
    close(loaded(folder), final)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == tied         # with or without an adapter in between
    if not more:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tied), folder)
        close(theirs(input_ids=IDS).logits, final)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_lines_of_the_page_make_a_plain_checkpoint(name, place):
    """docs/data.md's merge.py, on the default modules: transformers alone computes what was trained."""
    from transformers import AutoModelForCausalLM
    modules = ["--lora_target_modules", "q_proj", "down_proj"]
    _, final = run(name, "run", *modules)
    page = (Path(train.__file__).parent / "docs/data.md").read_text().split("`merge.py`:\n\n")[1].split("\nTransformers alone")[0]
    lines = textwrap.dedent(page).replace("runs/notes/checkpoints/step_40", "run/checkpoints/step_2")
    exec(lines.replace("checkpoints/SmolLM2-135M-Instruct", name), {})
    close(AutoModelForCausalLM.from_pretrained("runs/notes/merged")(input_ids=IDS).logits, final)
    assert not Path("runs/notes/merged/adapter_config.json").exists()


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids=" ".join)
def test_an_adapter_of_a_tied_matrix_changes_one_of_its_two_uses(modules, place):
    from plumbing.model.adapters import add_adapters, named_adapters
    args = parse(flags("tied", "--lora_target_modules", *modules))
    policy, _ = load_policy(args, None, torch.device("cpu"))
    add_adapters(policy, args)
    for p in named_adapters(policy).values():
        p.data.normal_(std=0.3)
    want = policy(input_ids=IDS).logits
    plain = merged(policy)
    close(plain(input_ids=IDS).logits, want)
    rounded = sampling_copy(policy, "bfloat16").float()(input_ids=IDS).logits
    assert (rounded - want).abs().max() < 0.02 * want.abs().max()
    assert policy.config.tie_word_embeddings and not plain.config.tie_word_embeddings
    plain.save_pretrained("out")
    TOKENIZER.save_pretrained("out")
    close(loaded("out"), want)


@pytest.mark.slow
def test_a_run_on_an_adapter_resumes_exactly_and_its_reference_is_its_start(place):
    run("untied", "first")
    on = ["--steps", "3", "--save_steps", "1", "--beta", "0.05", "--output_dir"]
    train.main(flags("first/checkpoints/step_2", *on, "whole"))
    records = metrics("whole")
    assert records[0]["kl"] == 0 < records[-1]["kl"]         # not the base model, to which the start has a distance
    train.main(flags("first/checkpoints/step_2", *on, "parts"))
    shutil.rmtree("parts/checkpoints/step_3")
    train.main(flags("first/checkpoints/step_2", *on, "parts", "--resume"))
    assert differences("whole", "parts", 3, weights="adapter_model.safetensors") == []


def refused(capsys, argv):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1, err
    return err


def test_other_adapters_than_those_of_the_checkpoint_are_refused(place, capsys):
    run("untied", "first")
    for more, words in ((["--lora_r", "8"], "have 4; give --lora_r 4"), (["--lora_alpha", "5"], "give --lora_alpha 32"),
                        (["--lora_target_modules", "q_proj"], "give --lora_target_modules down_proj lm_head q_proj")):
        err = refused(capsys, flags("first/checkpoints/step_2", *more, "--output_dir", "second"))
        assert words in err and "first/checkpoints/step_2" in err and not Path("second").exists()


def test_adapters_of_4_bit_weights_go_on_beside_4_bit_weights(place, capsys):
    pytest.importorskip("bitsandbytes")
    run("untied", "first", "--load_in_4bit")
    err = refused(capsys, flags("first/checkpoints/step_2", "--output_dir", "second"))
    assert "add --load_in_4bit" in err and not Path("second").exists()


def test_a_base_that_is_gone_or_an_adapter_is_named(place, capsys):
    run("untied", "first")
    Path("untied").rename("elsewhere")
    err = refused(capsys, flags("first/checkpoints/step_2", "--output_dir", "second"))
    assert "untied" in err and "first/checkpoints/step_2" in err
    file = Path("first/checkpoints/step_2/adapter_config.json")
    config = json.loads(file.read_text())
    Path("elsewhere").rename("untied")
    (Path("untied") / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "x"}))
    assert "an adapter itself" in refused(capsys, flags("first/checkpoints/step_2", "--output_dir", "second"))


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_without_use_peft_the_merged_weights_of_an_adapters_checkpoint_are_trained(model, place):
    """References: peft, for what the run starts from; transformers, which reads what it writes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    train.main([*flags(model), "--steps", "1", "--output_dir", "lora"])
    start = "lora/checkpoints/step_1"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, start).eval()
    more = [*SMALL, "--model_name_or_path", start, "--dataset_name", "rows.jsonl",
            "--verifier", "mine.py:reward", "--max_completion_length", "8",
            "--learning_rate", "0.02", "--warmup_steps", "0"]
    train.main([*more, "--steps", "1", "--output_dir", "full"])
    after = AutoModelForCausalLM.from_pretrained("full/checkpoints/step_1", dtype=torch.float32)
    moved = (after(IDS).logits - whole(IDS).logits).abs().max().item()
    assert moved > 1e-3 and metrics("full")[0]["grad_norm"] > 0
    train.main([*more, "--steps", "1", "--learning_rate", "1e-12", "--output_dir", "still"])
    still = AutoModelForCausalLM.from_pretrained("still/checkpoints/step_1", dtype=torch.float32)
    torch.testing.assert_close(still(IDS).logits, whole(IDS).logits, rtol=1e-5, atol=1e-5)
