"""The generation program turn after turn, and over many prompts: texts against Hugging Face's, what is refused."""

import io
import json
import os
import pty
import select
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
from models import PROMPTS, bundled, tiny_opt
from transformers import AutoTokenizer, TextStreamer

import dejavu_ds
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch import generate
from dejavu_ds.launch.interactive import Conversation, converse
from dejavu_ds.launch.prompts import parse_prompts

ROOT = Path(__file__).parents[1]
DENSE = ["--dense", "--dtype", "fp32"]
LINES = ["The king sat down and", "Then the queen", "She said that"]


@pytest.fixture(autouse=True)
def threads_left_alone(monkeypatch):
    """The program takes every core unless told otherwise, which would slow the tests after these."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def reference():
    return bundled(), AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")


@pytest.fixture
def refused(capsys):
    """Run the program on bad input; returns its complaint."""

    def run(*argv) -> str:
        with pytest.raises(SystemExit) as exit_:
            generate.main([*DENSE, *map(str, argv)])
        out, err = capsys.readouterr()
        assert exit_.value.code == 2 and out == ""
        return err.splitlines()[-1]

    return run


def hf_turns(reference, lines, new_tokens: int) -> list[str]:
    """The whole text is given to Hugging Face anew at every turn."""
    model, tokenizer = reference
    ids, texts = torch.zeros(1, 0, dtype=torch.long), []
    for line in lines:
        started = ids.shape[1] > 0
        added = tokenizer("\n" + line if started else line, add_special_tokens=not started, return_tensors="pt")
        ids = torch.cat([ids, added.input_ids], dim=1)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        ids = out[:, :-1] if out[0, -1] == tokenizer.eos_token_id else out
    return texts


# ---- turns


def test_turns_are_hugging_faces(reference, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*LINES[:2], "", "  ", LINES[2], "/new", LINES[1]])))
    generate.main([*DENSE, "--interactive", "--max-new-tokens", "10"])
    out, err = capsys.readouterr()
    want = hf_turns(reference, LINES, 10) + hf_turns(reference, LINES[1:2], 10)
    text, _, closing = out.rpartition("\n\n")
    assert text == "\n".join(want)
    assert "tokens/s" in closing and "Ctrl-D ends" in err


def test_only_what_is_new_runs_through_the_model(reference, monkeypatch):
    tokenizer, sizes = reference[1], []
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)
    forward = type(engine).forward

    def watched(self, input_ids=None, **kwargs):
        sizes.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(engine), "forward", watched)
    conversation = Conversation(engine, tokenizer, 6, {})
    for line in LINES:
        conversation.turn(line)
    added = [len(tokenizer("\n" + line, add_special_tokens=False).input_ids) for line in LINES[1:]]
    # Of a turn's tokens the last has not been through the model yet.
    assert sizes == [len(tokenizer(LINES[0]).input_ids), *(n + 1 for n in added)]
    assert conversation.new_tokens == 18


def test_a_text_that_the_model_wanted_to_end(reference):
    """The end-of-sequence token is left out of the text that the next line goes on from."""
    tokenizer = reference[1]
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)
    comma = tokenizer(",", add_special_tokens=False).input_ids
    engine.generation_config.eos_token_id = comma
    conversation = Conversation(engine, tokenizer, 30, {})
    conversation.turn(LINES[0])
    assert conversation.new_tokens < 30
    assert comma[0] not in conversation._ids[0].tolist()
    assert conversation._cache.length == conversation._ids.shape[1]
    conversation.turn(LINES[1])


def test_a_text_that_fills_the_model(reference, monkeypatch, capsys):
    """Where no positions are left the text is forgotten; a line that is too long by itself changes nothing."""
    sizes, tokenizer = {"vocab_size": 8192, "max_position_embeddings": 40}, reference[1]
    engine = dejavu_ds.init_inference(tiny_opt(**sizes), dtype=torch.float32)
    conversation = Conversation(engine, tokenizer, 10, {"eos_token_id": None})
    lines = [LINES[0], "word " * 40, LINES[1], LINES[2], LINES[0]]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    converse(conversation, lambda: TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    out, err = capsys.readouterr()
    model = tiny_opt(**sizes)
    model.generation_config.eos_token_id = None
    # 6 + 10 tokens of the first turn and 5 + 10 of the second leave no room for a third.
    turns = hf_turns((model, tokenizer), [LINES[0], LINES[1]], 10)
    assert out == "\n".join([*turns, *hf_turns((model, tokenizer), lines[3:], 10)]) + "\n"
    assert err.count("but there are 40 positions") == 1 and err.count("is forgotten") == 1


def test_a_turn_that_fails_leaves_the_text(reference):
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)
    conversation = Conversation(engine, reference[1], 6, {})
    conversation.turn(LINES[0])
    ids = conversation._ids
    conversation._options = {"num_beams": 2}
    with pytest.raises(ValueError, match="num_beams=2"):
        conversation.turn(LINES[1])
    assert conversation._ids is ids and conversation._cache.length == ids.shape[1] - 1
    conversation._options = {"do_sample": True, "temperature": 1e-40}
    with pytest.raises(ValueError, match="no token can be chosen"):
        conversation.turn(LINES[1])
    assert conversation._cache.length == ids.shape[1] - 1
    conversation._options = {"do_sample": False}
    conversation.turn(LINES[1])
    new = conversation._ids[0, ids.shape[1] :]
    want = hf_turns(reference, LINES[:2], 6)[1]
    assert reference[1].decode(new, skip_special_tokens=True).removeprefix("\n" + LINES[1]) == want


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self.process, self._fd = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            os.environ["TERM"] = "dumb"
            os.execv(command[0], command)

    def until(self, text: str, seconds: float = 120) -> str:
        """What it writes, up to and with `text`."""
        seen, end = "", time.monotonic() + seconds
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([self._fd], [], [], 0.5)[0]:
                seen += os.read(self._fd, 4096).decode(errors="replace")
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_status(self) -> int:
        """Once all that it writes is read, which a terminal ends with an error."""
        try:
            while os.read(self._fd, 4096):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="the launcher wants a GPU for each process")
def test_a_terminal_with_two_processes(reference):
    """History brings a line back, Ctrl-D ends both ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2"]
    program = ["--master_port", str(port), "launch/generate.py", *DENSE, "--interactive", "--max-new-tokens", "8"]
    terminal = Terminal([*launcher, *program])
    terminal.until("\n> ")
    want = hf_turns(reference, [LINES[0]] * 2, 8)
    for typed, text in zip((LINES[0] + "\n", "\x1b[A\n"), want, strict=True):
        terminal.type(typed)
        seen = terminal.until("\n> ").replace("\r", "")
        assert seen == f"{LINES[0]}\n{text}\n> "
    terminal.type("\x04")
    assert terminal.exit_status() == 0


# ---- many prompts


@pytest.mark.parametrize("kind", ["jsonl", "lines"])
@pytest.mark.parametrize("to_file", [True, False])
def test_many_prompts_are_hugging_faces(kind, to_file, reference, tmp_path, capsys):
    model, tokenizer = reference
    prompts, out = PROMPTS[:7], tmp_path / "out.jsonl"
    if kind == "jsonl":
        path, argv = tmp_path / "prompts.jsonl", []
        keys = ["prompt", "text"]
        path.write_text("\n\n".join(json.dumps({keys[i % 2]: prompt}) for i, prompt in enumerate(prompts)) + "\n")
    else:
        path, argv = tmp_path / "prompts.txt", ["--lines"]
        path.write_text("\r\n".join(prompts), "utf-8", newline="")
    argv += ["--out", str(out)] if to_file else []
    generate.main([*DENSE, "--prompt-file", str(path), "--batch-size", "3", "--max-new-tokens", "12", "--stats", *argv])
    printed, err = capsys.readouterr()
    lines = (out.read_text(encoding="utf-8") if to_file else printed).splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    for line in lines:
        record = json.loads(line)
        inputs = tokenizer(record["prompt"], return_tensors="pt")
        new = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
        assert record["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert record["new_tokens"] == len(new) and list(record) == ["prompt", "text", "new_tokens"]
    assert "7/7" in err and "tokens/s" in (printed if to_file else err)


def test_tokens_after_the_end_are_not_counted(reference):
    """A batch in which the prompts end at different steps: each is what it is alone."""
    from dejavu_ds.launch.prompts import generate_all

    model, tokenizer = reference
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32)
    ends = tokenizer([",", " and", "."], add_special_tokens=False).input_ids
    engine.generation_config.eos_token_id = [ids[0] for ids in ends]
    (records,) = generate_all(engine, tokenizer, PROMPTS[:5], 8, 30, {})
    counts = [record["new_tokens"] for record in records]
    assert len(set(counts)) > 2
    for record in records:
        inputs = tokenizer(record["prompt"], return_tensors="pt")
        options = {"max_new_tokens": 30, "eos_token_id": engine.generation_config.eos_token_id, "do_sample": False}
        assert model.generate(**inputs, **options).shape[1] - inputs.input_ids.shape[1] == record["new_tokens"]


def test_parsing_prompts():
    text = '{"prompt": "a\\u2028b"}\n\n{"text": "c", "id": 3}'
    assert parse_prompts(text, "x", True) == ["a\u2028b", "c"]
    assert parse_prompts(" a\r\n\nb ", "x", False) == [" a", "b "]
    for text, message in (
        ("", "x holds no prompt"),
        ('{"prompt": "a"}\n{', "x line 2 is not JSON"),
        ("[1]", 'x line 1: expected an object with a "prompt"'),
        ('{"prompt": 3}', "x line 1: expected"),
        ('{"prompt": " "}', "x line 1: the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_prompts(text, "x", True)


def test_options_that_do_not_go_together(refused, tmp_path):
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("It was\n" + "word " * 2000)
    assert "--out is for many prompts" in refused("--out", out)
    assert "--batch-size is for many prompts" in refused("--batch-size", "3", "--prompt-file", path)
    assert "--lines is for many prompts" in refused("--lines")
    assert "--json is for one prompt" in refused("--prompt-file", path, "--lines", "--json")
    assert "--json is for one prompt" in refused("--interactive", "--json")
    assert "not allowed with" in refused("--interactive", "--prompt", "a")
    assert "there is no folder" in refused("--prompt-file", path, "--lines", "--out", tmp_path / "no" / "out")
    out.write_text("older\n")
    line = refused("--prompt-file", path, "--lines", "--out", out)
    assert "prompt 2: prompt of 2003 tokens + 64 new tokens" in line
    assert out.read_text() == "older\n", "what is refused touches no file"
