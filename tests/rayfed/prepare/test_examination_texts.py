"""The first texts of a table, as a model reads them, with what is learned between marks."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.prepare.__main__ import main
from tests.rayfed.data.test_tokens_conversations import CHATML, TALK
from tests.tiny_models import save, tokenizer_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("shown")
    save("llama", root / "chat", language=True, max_position_embeddings=200)
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(root / "chat")
    save("bert", root / "bert")
    save("gpt2", root / "plain", language=True)
    return root


@pytest.fixture
def run(tmp_path, capsys):
    def run(*argv):
        code = main([*argv, "--cache", str(tmp_path / "cache")])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
            out.writeheader()
            out.writerows(rows)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet"])
def test_a_table_is_given_as_root(run, folders, tmp_path, kind):
    rows = [{"prompt": f"is {i} it", "completion": "one", "user": f"u{i}"} for i in range(4)]
    path = written(tmp_path / f"rows.{kind}", rows)
    model = f"model=hf/{folders / 'plain'}"
    code, out, err = run(kind, "--root", str(path), model, "--show", "2", "data.columns={client: user}")
    assert code == 0, err
    assert "texts" in out
    assert f"row 1 of {path}, client u0, " in out
    assert "is 0 it\n‹one</s>›" in out
    assert "is 1 it\n‹one</s>›" in out
    assert "is 2 it" not in out


def test_turns_of_the_assistant_are_between_marks(run, folders, tmp_path):
    path = written(tmp_path / "rows.jsonl", [{"messages": TALK}, {"messages": TALK[1:]}])
    model = f"model=hf/{folders / 'chat'}"
    code, out, err = run("jsonl", "--root", str(path), model, "model.size=64", "--show", "3")
    assert code == 0, err
    assert "cut" in out.partition("row 1")[2].splitlines()[0]
    short = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    path = written(tmp_path / "short.jsonl", short)
    code, out, err = run("jsonl", "--root", str(path), model, "--show", "1")
    assert code == 0, err
    assert "<|im_start|>assistant\n‹b<|im_end|>\n›" in out


def test_of_a_pair_the_second_text_begins_behind_a_bar(run, folders, tmp_path):
    rows = [{"a": "one", "b": "is it", "label": "x"}, {"a": "card", "b": "rate", "label": "y"}]
    path = written(tmp_path / "rows.csv", rows)
    tokenizer = tokenizer_of("bert")
    columns = "data.columns={text: a, text_pair: b}"
    code, out, err = run("csv", "--root", str(path), f"model=hf/{folders / 'bert'}", "--show", "1", columns)
    assert code == 0, err
    assert "class x" in out
    assert tokenizer.decode(tokenizer("one", "is it")["input_ids"]) in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("digits_five_mini", "--show", "2"), "--show: shows texts, and 'digits_five_mini' has none"),
        (("intents_mini", "--show", "0"), "--show: 0 is not a number of texts from 1"),
    ],
)
def test_what_cannot_be_shown_is_said(run, argv, words):
    code, _, err = run(*argv)
    assert code == 2
    assert words in err
