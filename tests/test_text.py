import json
from types import SimpleNamespace

import pytest
import torch

from dejavu_ds.text import cut_windows, read_documents, split_documents, token_ids


class CharTokenizer:
    """One token a character."""

    bos_token_id = 2

    def __call__(self, documents, **_):
        return SimpleNamespace(input_ids=[[ord(c) for c in text] for text in documents])


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    # U+2028 may stand raw inside a JSON string: it ends no record.
    texts = ["one", "two\u2028still two", "", "three"]
    path.write_text("\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + "\n\n", "utf-8")
    assert read_documents(path) == [text for text in texts if text]
    assert read_documents(path, samples=2) == texts[:2]


def test_txt_splits_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\none\nmore\n \n\ntwo\n", "utf-8")
    assert read_documents(path) == ["one\nmore", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "no text"),
        ("a.txt", "\n \n", "no text"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", '{"title": "x"}', r'line 1.*"text"'),
        ("a.jsonl", "[1]", r'line 1.*"text"'),
        ("a.csv", "x", r"\.csv"),
    ],
)
def test_rejects_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_documents(tmp_path / name)


def test_rejects_missing_file_and_no_samples(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.txt"):
        read_documents(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match="samples"):
        read_documents(tmp_path / "absent.txt", samples=0)


def test_split_takes_whole_documents_from_the_end():
    documents = [str(n) for n in range(50)]
    assert split_documents(documents, 0.08) == (documents[:46], documents[46:])
    assert split_documents(["a", "b"], 0.9) == (["a"], ["b"])
    with pytest.raises(ValueError, match="at least 2"):
        split_documents(["a"], 0.5)


def test_windows_hold_every_document_after_a_bos():
    ids = token_ids(["abc", "de"], CharTokenizer())
    assert ids.tolist() == [2, 97, 98, 99, 2, 100, 101]
    assert torch.equal(cut_windows(ids, 3), ids[:6].view(2, 3))
    with pytest.raises(ValueError, match="7 tokens do not fill one window of 8"):
        cut_windows(ids, 8)


def test_rejects_tokenizer_without_bos():
    tokenizer = CharTokenizer()
    tokenizer.bos_token_id = None
    with pytest.raises(ValueError, match="bos_token"):
        token_ids(["abc"], tokenizer)
