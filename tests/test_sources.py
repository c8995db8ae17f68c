import sys
from types import SimpleNamespace

import pytest
import torch
from training import WordTokenizer, tiny_model

from dejavu_ds.sources import documents_of, sampled_documents


def test_a_file_is_read_as_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert documents_of(tmp_path / "a.txt", 1) == ["one"]
    with pytest.raises(ValueError, match=r"cannot read texts/absent\.txt"):
        documents_of("texts/absent.txt", 1)


def test_a_hub_data_set_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"organisation/set .*pip install datasets"):
        documents_of("organisation/set", 3)


def hub_with(monkeypatch, rows=(), error=None) -> list:
    asked = []

    def load_dataset(*arguments, **keywords):
        asked.append((arguments, keywords["split"]))
        if error:
            raise error
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_hub_data_set_is_read_no_further_than_needed(monkeypatch):
    def rows():
        yield from ({"text": "one"}, {"text": " "}, {"text": "two"})
        raise AssertionError("read too far")

    asked = hub_with(monkeypatch, rows())
    assert documents_of("organisation/set", 2) == ["one", "two"]
    hub_with(monkeypatch, [])
    assert asked == [(("organisation/set", None), "train")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b:test", (("a/b", None), "test")),
        ("a/b:raw:test", (("a/b", "raw"), "test")),
    ],
)
def test_split_and_configuration(monkeypatch, name, expected):
    asked = hub_with(monkeypatch, [{"text": "one"}])
    assert documents_of(name, None) == ["one"] and asked == [expected]


def test_hub_errors_are_named(monkeypatch):
    hub_with(monkeypatch, error=ConnectionError("no route"))
    with pytest.raises(ValueError, match=r"data set a/b .*ConnectionError: no route"):
        documents_of("a/b", 2)
    hub_with(monkeypatch, [{"title": "x"}])
    with pytest.raises(ValueError, match='no rows with text in a field "text"'):
        documents_of("a/b", 2)


def test_sampled_text_follows_the_model():
    """The frequency of the second token is its probability after the bos token."""
    model, tokenizer = tiny_model(), WordTokenizer()
    model.lm_head.weight.data *= 4
    documents = sampled_documents(model, tokenizer, 2000, 2, seed=0)
    counts = torch.bincount(torch.tensor([int(text) for text in documents]), minlength=60).double()
    with torch.no_grad():
        expected = model(torch.tensor([[2]])).logits[0, -1].double().softmax(-1)
    expected[2] = 0  # the eos token ends the passage, which is then empty
    expected /= expected.sum()
    # Chi-square over 59 cells: mean 58, standard deviation 10.8.
    assert ((counts - expected * counts.sum()) ** 2 / (expected * counts.sum()).clamp(min=1e-9)).sum() < 58 + 5 * 10.8


def test_sampling_is_seeded_and_ends_at_eos():
    model, tokenizer = tiny_model(), WordTokenizer()
    first = sampled_documents(model, tokenizer, 40, 20, seed=3)
    assert first == sampled_documents(model, tokenizer, 40, 20, seed=3)
    assert first != sampled_documents(model, tokenizer, 40, 20, seed=4)
    assert all(0 < len(text.split()) < 20 and "2" not in text.split() for text in first)
    with pytest.raises(ValueError, match="65 tokens: need 2 to 64"):
        sampled_documents(model, tokenizer, 4, 65, seed=0)
