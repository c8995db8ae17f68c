"""The engine as a model of lm-eval: likelihoods, texts and metrics by hand from Hugging Face's logits."""

import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from models import tiny_opt
from test_lookahead import MaskedReference, random_predictors
from transformers import AutoTokenizer

import dejavu_ds
from dejavu_ds import harness
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.harness import EngineLM, local_task, run_task

WORDS = {"vocab_size": 8192}
CHOICES = [
    {"query": "The river ran", "choices": ["down to the sea.", "up."], "gold": 0},
    {"query": "He opened the", "choices": ["door and went in", "sky", "king of the old town"], "gold": 2},
    {"query": "Where is the cat?", "choices": ["On the mat", "Nowhere at all, I think"], "gold": 1},
]
CONTINUATIONS = [
    {"context": "She looked at the", "continuation": "window"},
    {"context": "The king sat down and spoke to his", "continuation": "people"},
    {"context": "It was a dark", "continuation": "night"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_model())


@pytest.fixture
def engine():
    return dejavu_ds.init_inference(tiny_opt(**WORDS), dtype=torch.float32)


@pytest.fixture
def reference(device):
    return tiny_opt(**WORDS).to(device)


def request(*args):
    return SimpleNamespace(args=args)


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def likelihood(model, ids, count):
    """Of the last `count` of the ids, and whether they are the likeliest."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=device)).logits[0].double().cpu()
    expected, targets = logits.log_softmax(-1)[-count - 1 : -1], torch.tensor(ids[-count:])
    return expected.gather(-1, targets[:, None]).sum().item(), bool((expected.argmax(-1) == targets).all())


def pair(tokenizer, context, continuation):
    whole = tokenizer(context + continuation).input_ids
    return whole, len(whole) - len(tokenizer(context).input_ids)


@pytest.mark.parametrize("mode", ["dense", "decode"])
def test_likelihoods(mode, engine, reference, tokenizer):
    greedy_ids = reference.generate(**tokenizer("In the", return_tensors="pt").to(reference.device), max_new_tokens=1)
    pairs = [("The king", " sat down"), ("A", " b c d"), ("My father", " told me"), ("She", " said that she")]
    lm = EngineLM(engine, tokenizer, mode, batch_size=2)
    got = lm.loglikelihood([request(*p) for p in pairs])
    wanted = [likelihood(reference, *pair(tokenizer, *p)) for p in pairs]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in wanted], rel=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    ids = greedy_ids[0].tolist()
    assert lm._loglikelihood_tokens([(None, ids[:-1], ids[-1:])])[0][1] is True
    # Without context, the bos token stands before the text.
    (alone,) = lm.loglikelihood([request("", "King of")])
    ids = tokenizer("King of", add_special_tokens=False).input_ids
    assert alone[0] == pytest.approx(likelihood(reference, [2, *ids], len(ids))[0], rel=1e-4)
    assert lm.tokens == sum(pair(tokenizer, *p)[1] for p in pairs) + 1 + len(ids)


@pytest.mark.parametrize("mode", ["masked", "decode"])
def test_sparse_likelihoods(mode, tokenizer, device):
    """The context is sparse too, from the first token on."""
    predictors = random_predictors(tiny_opt(**WORDS), "half")
    engine = dejavu_ds.init_inference(tiny_opt(**WORDS), predictors=predictors, dtype=torch.float32)
    for p in (*predictors.mlp, *predictors.heads):
        p.to(device)
    reference = MaskedReference(tiny_opt(**WORDS).to(device), predictors, {"mlp": 0.5, "heads": 0.5}, start=0)
    lm = EngineLM(engine, tokenizer, mode)
    ((value, _),) = lm.loglikelihood([request("The king sat down and spoke", " to the people of his town")])
    ids, count = pair(tokenizer, "The king sat down and spoke", " to the people of his town")
    logits = reference(torch.tensor([ids], device=device))[0].cpu()
    wanted = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[-count:].sum().item()
    assert value == pytest.approx(wanted, rel=1e-4)
    assert 0.2 < lm.scorer.densities()[0] < 0.98


def test_long_texts(engine, reference, tokenizer):
    """400 positions: of a longer context the end counts; of a longer text every token, the last with a full window."""
    words = ["king", "river", "old", "town", "night", "window", "sea"]
    text = " ".join(words[i * i % 7] for i in range(700))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) > 420
    lm = EngineLM(engine, tokenizer, "dense")
    (value,) = lm.loglikelihood_rolling([request(text)])
    wanted, done = likelihood(reference, [2, *ids[:399]], 399)[0], 399
    # The model reads 400 tokens and predicts one more: 401 in a window.
    wanted += likelihood_read(reference, [2, *ids[:399]], ids[399])
    done = 400
    while done < len(ids):
        stop = min(done + 400, len(ids))
        window = ids[stop - 401 : stop]
        wanted += likelihood(reference, window[:-1], stop - done - 1)[0] if stop - done > 1 else 0.0
        wanted += likelihood_read(reference, window[:-1], window[-1])
        done = stop
    assert value == pytest.approx(wanted, rel=1e-4) and lm.tokens == len(ids)
    ((cut, _),) = lm.loglikelihood([request(text, " king")])
    whole = tokenizer(text + " king").input_ids
    assert cut == pytest.approx(likelihood_read(reference, whole[-401:-1], whole[-1]), rel=1e-4)
    with pytest.raises(ValueError, match="does not fit the model's 400 positions"):
        lm.loglikelihood([request("A", " " + text)])


def likelihood_read(model, ids, target):
    """Of `target` after all the ids, as many as the model has positions."""
    with torch.no_grad():
        logits = model(torch.tensor([ids], device=next(model.parameters()).device)).logits[0, -1]
    return logits.double().log_softmax(-1)[target].item()


def test_texts_end_before_the_stop(engine, reference, tokenizer):
    inputs = tokenizer("The king sat down and", return_tensors="pt").to(reference.device)
    out = reference.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
    whole = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    lm = EngineLM(engine, tokenizer, "decode")
    stop = whole[5:8]
    options = [{"max_gen_toks": 12, "until": []}, {"max_gen_toks": 12, "until": ["@@@", stop], "temperature": 0.0}]
    got = lm.generate_until([request("The king sat down and", o) for o in options])
    assert whole.startswith(got[0]) and len(got[0]) > 8
    assert got[1] == whole[: whole.index(stop)]
    with pytest.raises(ValueError, match="400 new tokens"):
        lm.generate_until([request("A", {"max_gen_toks": 400})])
    with pytest.raises(ValueError, match="mode decode"):
        EngineLM(engine, tokenizer, "masked").generate_until([request("A", {})])


def test_multiple_choice_from_a_file(engine, reference, tokenizer, tmp_path):
    right = right_norm = 0
    for item in CHOICES:
        values = [likelihood(reference, *pair(tokenizer, item["query"], " " + c))[0] for c in item["choices"]]
        by_byte = [value / len(choice) for value, choice in zip(values, item["choices"], strict=True)]
        right += values.index(max(values)) == item["gold"]
        right_norm += by_byte.index(max(by_byte)) == item["gold"]
    task = local_task("mine", write(tmp_path / "mine.jsonl", CHOICES))
    results = {r.metric: r for r in run_task(EngineLM(engine, tokenizer, "dense"), task)}
    assert {r.task for r in results.values()} == {"mine"}
    assert results["acc"].value == pytest.approx(right / 3)
    assert results["acc_norm"].value == pytest.approx(right_norm / 3)
    p = right / 3
    assert results["acc"].stderr == pytest.approx(math.sqrt(p * (1 - p) / 2))


@pytest.mark.parametrize("shots", [0, 1])
def test_continuations_from_a_file(shots, engine, reference, tokenizer, tmp_path):
    """With one shot and two items, the other one is the example."""
    items = CONTINUATIONS[: 3 - shots]
    values = []
    for i, item in enumerate(items):
        other = items[1 - i] if shots else None
        prompt = f"{other['context']} {other['continuation']}\n\n" if shots else ""
        ids, count = pair(tokenizer, prompt + item["context"], " " + item["continuation"])
        values.append(likelihood(reference, ids, count))
    task = local_task("words", write(tmp_path / "words.jsonl", items))
    results = {r.metric: r for r in run_task(EngineLM(engine, tokenizer, "dense"), task, num_fewshot=shots)}
    mean = sum(value for value, _ in values) / len(values)
    assert results["perplexity"].value == pytest.approx(math.exp(-mean), rel=1e-3)
    assert results["perplexity"].stderr > 0
    assert results["acc"].value == sum(greedy for _, greedy in values) / len(values)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "holds no items"),
        ("{", "line 1 is not JSON"),
        ('{"text": "a"}', 'line 1: expected {"context", "continuation"}'),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "gold is 1, but there are 1 choices"),
        ('{"context": "a", "continuation": "b"}\n{"query": "a", "choices": ["b"], "gold": 0}', "items of both forms"),
    ],
)
def test_bad_files_are_refused(content, message, tmp_path):
    path = tmp_path / "task.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        local_task("mine", path)
    with pytest.raises(ValueError, match="cannot read"):
        local_task("mine", tmp_path / "absent.jsonl")


def test_tasks_by_name(engine, tokenizer, tmp_path, monkeypatch):
    """The harness's own index of many thousands takes long to read; one of a single file stands in for it."""
    task = local_task("mine", write(tmp_path / "mine.jsonl", CHOICES))
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    index = partial(harness.TaskManager, include_path=str(tmp_path))
    monkeypatch.setattr(harness, "TaskManager", lambda include_defaults: index(include_defaults=not include_defaults))
    by_name = run_task(EngineLM(engine, tokenizer, "dense"), "mine")
    assert [r.metric for r in by_name] == ["acc", "acc_norm"]
    with pytest.raises(ValueError, match="knows no task 'no_such_task'"):
        run_task(EngineLM(engine, tokenizer, "dense"), "no_such_task")
