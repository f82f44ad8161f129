"""Readers of texts: tables with columns of any name, and the layouts of named data sets."""

import csv
import json
from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfed.config.schema import load_config
from rayfed.data.load_dataset import load
from rayfed.data.named.texts import messages_of
from rayfed.data.source import make_source, task_of
from rayfed.data.text import Text
from rayfed.errors import ConfigError, DataError
from rayfed.objective import LANGUAGE_MODELING, TEXT_CLASSIFICATION, TEXT_REGRESSION
from tests.tiny_models import tokenizer_of

ROWS = [
    {"body": "where is, my card", "kind": "card", "user": "ann", "site": "a"},
    {"body": 'a "wrong" rate', "kind": "rate", "user": "bob", "site": "b"},
    {"body": "my card", "kind": "card", "user": "ann", "site": "b"},
]
COLUMNS = {"text": "body", "label": "kind", "client": "user", "domain": "site"}


TOLD = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def source(name, root, **options):
    config = load_config([f"data={name}", f"data.root={root}", "algorithm=fedavg"]).data
    return make_source(replace(config, **options))


def written(folder, kind, rows, name="mails"):
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import csv

        with path.open("w", newline="") as file:
            quoting = csv.QUOTE_NONE if kind == "tsv" else csv.QUOTE_MINIMAL
            out = csv.DictWriter(
                file,
                list(rows[0]),
                delimiter="\t" if kind == "tsv" else ",",
                quoting=quoting,
                quotechar=None if kind == "tsv" else '"',
            )
            out.writeheader()
            out.writerows(rows)
    return path


def texts_of(found, listing):
    return [found.decode(listing, place, 0) for place in range(len(listing.keys))]


@pytest.mark.parametrize("indent", [None, 1])
def test_leaf_has_a_folder_for_each_split_and_the_samples_of_each_user(tmp_path, indent):
    """The layout of Sent140: x is a list, whose fifth value is the text."""

    def tweet(text):
        return ["1", "Mon", "NO_QUERY", "someone", text, "training"]

    data = {"train": {"ann": ["a", "b"], "bob": ["c"]}, "test": {"ann": ["d"]}}
    for split, users in data.items():
        (tmp_path / split).mkdir()
        own = {
            user: {"x": [tweet(text) for text in texts], "y": [len(texts) % 2] * len(texts)}
            for user, texts in users.items()
        }
        whole = {"users": [*own], "num_samples": [len(v["y"]) for v in own.values()], "user_data": own}
        (tmp_path / split / "all_data_keep_9.json").write_text(json.dumps(whole, indent=indent))
    found = source("jsonl", tmp_path, columns={"text": "x4", "label": "y", "client": "user"})
    listing = found.scan()
    assert task_of(found) == TEXT_CLASSIFICATION
    by_text = sorted(
        (text.text, owner, listing.classes[label], bool(test))
        for text, owner, label, test in zip(
            texts_of(found, listing), listing.owners, listing.labels, listing.test, strict=True
        )
    )
    assert by_text == [
        ("a", "ann", "0", False),
        ("b", "ann", "0", False),
        ("c", "bob", "1", False),
        ("d", "ann", "1", True),
    ]
    plain = {"user_data": {"ann": {"x": ["next"], "y": ["t"]}}}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    named = {"prompt": "x", "completion": "y", "client": "user"}
    found = source("jsonl", tmp_path / "plain.json", columns=named)
    assert texts_of(found, found.scan()) == [Text(text="next", answer="t")]
    (tmp_path / "plain.json").write_text('{"user_data": {"ann": {"x": ["next"], "y": []}}}')
    with pytest.raises(DataError, match=r"data\.root: .* is not of LEAF's layout"):
        source("jsonl", tmp_path / "plain.json", columns=named).scan()


def test_a_list_of_lists_has_the_samples_of_a_client_each(tmp_path):
    """The layouts of FedLLM-Bench: instructions with responses, and conversations."""
    asked = [[{"instruction": "a", "response": "b"}, {"instruction": "c", "response": "d"}]]
    asked += [[], [{"instruction": "e", "response": "f"}]]
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    found = source("jsonl", tmp_path / "asked.json", columns={"client": "client"})
    listing = found.scan()
    assert task_of(found) == LANGUAGE_MODELING
    assert listing.owners == ["0", "0", "2"]
    assert texts_of(found, listing) == [Text(text=own[0], answer=own[1]) for own in ("ab", "cd", "ef")]
    told = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    (tmp_path / "told.json").write_text(json.dumps([[{"conversations": told}]]))
    found = source("jsonl", tmp_path / "told.json", columns={"client": "client"})
    assert texts_of(found, found.scan()) == [Text(messages=TOLD)]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_in_every_format(tmp_path, kind):
    found = source(kind, written(tmp_path, kind, ROWS), columns=COLUMNS)
    listing = found.scan()
    assert task_of(found) == TEXT_CLASSIFICATION
    assert listing.classes == ("card", "rate")
    assert listing.domains == ("a", "b")
    assert list(listing.owners) == ["ann", "bob", "ann"]
    assert listing.labels.tolist() == [0, 1, 0]
    assert [found.decode(listing, i, 9).text for i in range(3)] == [row["body"] for row in ROWS]
    assert not listing.test.any()
    assert listing.keys[0] == "a/card/mails-0000000"


def test_a_folder_has_a_file_for_each_split(tmp_path):
    written(tmp_path, "jsonl", ROWS, "train")
    written(tmp_path, "jsonl", ROWS[:1], "validation")
    written(tmp_path, "jsonl", ROWS[:2], "extra")
    found = source("jsonl", tmp_path, columns=COLUMNS).scan()
    assert [key.rpartition("/")[2] for key, test in zip(found.keys, found.test, strict=True) if test] == [
        "validation-0000000"
    ]
    written(tmp_path, "jsonl", ROWS[:2], "test")
    found = source("jsonl", tmp_path, columns=COLUMNS).scan()
    assert found.test.sum() == 2


@pytest.mark.parametrize(
    ("row", "columns", "task", "expected"),
    [
        ({"text": "a", "label": 3}, None, TEXT_CLASSIFICATION, Text(text="a")),
        (
            {"sentence1": "a", "sentence2": "b", "label": 0},
            {"text": "sentence1", "text_pair": "sentence2"},
            TEXT_CLASSIFICATION,
            Text(text="a", pair="b"),
        ),
        ({"prompt": "a", "completion": "b"}, None, LANGUAGE_MODELING, Text(text="a", answer="b")),
        ({"question": "a", "answer": "b", "label": "c"}, None, LANGUAGE_MODELING, Text(text="a", answer="b")),
        (
            {"in": "a", "out": "b"},
            {"prompt": "in", "completion": "out"},
            LANGUAGE_MODELING,
            Text(text="a", answer="b"),
        ),
        ({"text": "a"}, None, LANGUAGE_MODELING, Text(text="a")),
        (
            {"sentence1": "a", "sentence2": "b", "label": 2.5},
            {"text": "sentence1", "text_pair": "sentence2", "score": "label"},
            TEXT_REGRESSION,
            Text(text="a", pair="b", score=2.5),
        ),
        (
            {"text": "a", "label": "x", "near": "-1"},
            {"score": "near"},
            TEXT_REGRESSION,
            Text(text="a", score=-1.0),
        ),
        (
            {"instruction": "a", "input": "c", "output": "b"},
            {"context": "input"},
            LANGUAGE_MODELING,
            Text(text="a\nc", answer="b"),
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            {"context": "input"},
            LANGUAGE_MODELING,
            Text(text="a", answer="b"),
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            None,
            LANGUAGE_MODELING,
            Text(messages=TOLD),
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            None,
            LANGUAGE_MODELING,
            Text(messages=TOLD),
        ),
    ],
)
def test_columns_say_what_is_learned(tmp_path, row, columns, task, expected):
    found = source("jsonl", written(tmp_path, "jsonl", [row, row]), columns=columns)
    assert task_of(found) == task
    assert found.decode(found.scan(), 1, 9) == expected


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ('{"a": 1}\n', None, "no column of"),
        ('{"text": "x", "label": "y"}\n', {"text": "nothing"}, r"data\.columns\.text"),
        ('{"text": "x", "label": "y"}\n', {"txt": "text"}, r"data\.columns: no such|did you mean|txt"),
        ('{"text": "x", "label": null}\n', None, "has no value in 'label'"),
        ("[1, 2]\n", None, "is no JSON object"),
        ("{not json\n", None, "is not JSON"),
        ('{"messages": [{"role": "pirate", "content": "arr"}]}\n', None, "no list of messages"),
        ('{"messages": "hello"}\n', None, "no list of messages"),
    ],
)
def test_a_bad_table_is_explained(tmp_path, text, columns, words):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=words):
        source("jsonl", tmp_path / "x.jsonl", columns=columns).scan()


@pytest.mark.parametrize("value", ["much", "nan", ""])
def test_a_score_is_a_finite_number(tmp_path, value):
    path = written(tmp_path, "jsonl", [{"text": "a", "near": value}])
    with pytest.raises(DataError, match=r"data\.columns\.score: row 1 of .*mails"):
        source("jsonl", path, columns={"score": "near"}).scan()


PARTS = "{split}-0000{part}-of-00002.parquet"


def hub(folder, splits):
    """Parquet files of a data set as the hub has them, each split in two parts."""
    for split, rows in splits.items():
        for part in range(2):
            pq.write_table(pa.Table.from_pylist(rows[part::2]), folder / PARTS.format(split=split, part=part))


def labelled(label, count, **columns):
    return [{**{name: f"{text} {i}" for name, text in columns.items()}, "label": label} for i in range(count)]


def test_of_glue_the_validation_split_is_scored_because_test_has_no_labels(tmp_path):
    train = labelled(0, 2, sentence="a") + labelled(1, 2, sentence="b")
    splits = {
        "train": train,
        "validation": labelled(1, 2, sentence="c"),
        "test": labelled(-1, 2, sentence="d"),
    }
    hub(tmp_path, splits)
    found = source("glue_sst2", tmp_path)
    listing = found.scan()
    assert listing.classes == ("0", "1")
    assert listing.test_name == "validation"
    texts = [found.decode(listing, i, 9).text for i in range(len(listing.labels))]
    assert {text for text, test in zip(texts, listing.test, strict=True) if test} == {"c 0", "c 1"}
    assert {text for text, test in zip(texts, listing.test, strict=True) if not test} == {
        "a 0",
        "a 1",
        "b 0",
        "b 1",
    }


def test_of_mnli_the_matched_validation_split_is_scored(tmp_path):
    def pairs(label, text):
        return labelled(label, 2, premise=text, hypothesis="h")

    hub(
        tmp_path,
        {
            "train": pairs(0, "a") + pairs(1, "a") + pairs(2, "a"),
            "validation_matched": pairs(0, "b"),
            "validation_mismatched": pairs(0, "c"),
            "test_matched": pairs(-1, "d"),
            "test_mismatched": pairs(-1, "e"),
        },
    )
    found = source("glue_mnli", tmp_path)
    listing = found.scan()
    assert listing.test.sum() == 2
    assert listing.test_name == "validation_matched"
    texts = {found.decode(listing, i, 9) for i in range(len(listing.labels))}
    assert {text.text[0] for text in texts} == {"a", "b"}
    assert all(text.pair for text in texts)


GLUE = {
    "cola": ("sentence",),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "mrpc": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
}


@pytest.mark.parametrize("name", GLUE)
def test_the_columns_of_glue(tmp_path, name):
    columns = GLUE[name]
    values = (0.0, 5.0, -1.0) if name == "stsb" else (0, 1, -1)
    one, other, unknown = (labelled(v, 2, **dict.fromkeys(columns, "x")) for v in values)
    hub(tmp_path, {"train": one + other, "validation": other, "test": unknown})
    found = source(f"glue_{name}", tmp_path)
    listing = found.scan()
    assert task_of(found) == (TEXT_REGRESSION if name == "stsb" else TEXT_CLASSIFICATION)
    assert (len(listing.labels), listing.test.sum()) == (6, 2)
    text = found.decode(listing, 0, 9)
    assert (text.text, text.pair) == ("x 0", "x 0" if len(columns) == 2 else None)
    assert text.score == (0.0 if name == "stsb" else None)


def test_instructions_and_news_in_their_published_layouts(tmp_path):
    rows = [
        {"instruction": "i", "context": "c", "response": "r", "category": "open_qa"},
        {"instruction": "i", "context": "", "response": "r", "category": "closed_qa"},
    ]
    dolly = source("dolly", written(tmp_path, "jsonl", rows, "databricks-dolly-15k"))
    assert dolly.scan().domains == ("closed_qa", "open_qa")
    assert dolly.decode(dolly.scan(), 0, 9) == Text(text="i\nc", answer="r")
    (tmp_path / "alpaca_data.json").write_text(json.dumps([{"instruction": "i", "input": "", "output": "o"}]))
    alpaca = source("alpaca", tmp_path / "alpaca_data.json")
    assert alpaca.decode(alpaca.scan(), 0, 9) == Text(text="i", answer="o")
    folder = tmp_path / "news"
    folder.mkdir()
    hub(
        folder,
        {"train": [{"text": "t", "label": i % 4} for i in range(8)], "test": [{"text": "u", "label": 3}] * 2},
    )
    news = source("ag_news", folder).scan()
    assert (news.classes, news.test.sum()) == (("0", "1", "2", "3"), 2)
    posts = tmp_path / "posts"
    posts.mkdir()
    for split in ("train", "test"):
        groups = [
            {"text": "t", "label": i, "label_text": name} for i, name in enumerate(("alt.atheism", "sci.med"))
        ]
        written(posts, "jsonl", groups, split)
    found = source("20_newsgroups", posts).scan()
    assert (found.classes, found.test.sum(), len(found.test)) == (("alt.atheism", "sci.med"), 2, 4)


def test_a_csv_with_a_short_row_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("text,label\na,b\nc\n")
    with pytest.raises(DataError, match="row 3"):
        source("csv", tmp_path / "x.csv").scan()


def banking(folder):
    (folder / "train.csv").write_text('text,category\n"a, b",lost\nc,pin\n')
    (folder / "test.csv").write_text("text,category\nd\n,pin\n".replace("d\n,", '"d\n",'))


def clinc(folder):
    data = {
        "train": [["a", "pin"], ["b", "rain"]],
        "val": [["c", "pin"]],
        "test": [["d", "rain"]],
        "oos_test": [["e", "oos"]],
    }
    (folder / "data_full.json").write_text(json.dumps(data))
    (folder / "domains.json").write_text(json.dumps({"bank": ["pin"], "small_talk": ["rain"]}))


def gsm(folder):
    (folder / "train.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "two\n#### 2"}) + "\n")
    (folder / "test.jsonl").write_text(json.dumps({"question": "1 + 2?", "answer": "three\n#### 3"}) + "\n")


def medquad(folder):
    for place, name in ((1, "CancerGov_QA"), (8, "NHLBI_QA_XML")):
        inside = folder / f"{place}_{name}"
        inside.mkdir()
        (inside / "0001.xml").write_text(
            '<Document><QAPairs><QAPair pid="1"><Question qtype="causes">Why\n is it?</Question>'
            "<Answer>Because  of it.</Answer></QAPair>"
            "<QAPair><Question>No answer?</Question><Answer/></QAPair></QAPairs></Document>"
        )


@pytest.mark.parametrize(
    ("name", "make", "texts", "classes", "domains"),
    [
        ("banking77", banking, ["a, b", "c", "d"], ("lost", "pin"), ("all",)),
        ("clinc150", clinc, ["a", "b", "c", "d"], ("pin", "rain"), ("bank", "small_talk")),
        ("gsm8k", gsm, ["1 + 1?", "1 + 2?"], ("text",), ("all",)),
        ("medquad", medquad, ["Why is it?", "Why is it?"], ("causes",), ("CancerGov", "NHLBI")),
    ],
)
def test_layouts_of_named_data_sets(tmp_path, name, make, texts, classes, domains):
    make(tmp_path)
    found = source(name, tmp_path)
    listing = found.scan()
    assert sorted(found.decode(listing, i, 9).text for i in range(len(listing.keys))) == texts
    assert (listing.classes, listing.domains) == (classes, domains)
    assert listing.test.sum() == (name != "medquad")
    assert found.fingerprint() == listing.fingerprint == source(name, tmp_path).fingerprint()
    with pytest.raises(DataError, match=r"data\.root"):
        source(name, tmp_path / "nowhere").scan()


COUNTS = {
    "banking77": (10003, 3080, 77, 1),
    "clinc150": (18000, 4500, 150, 10),
    "gsm8k": (7473, 1319, 1, 1),
    "medquad": (1825, 0, None, 9),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_real_files(shared, name):
    listing = source(name, shared / "data" / "text" / name).scan()
    train, test, classes, domains = COUNTS[name]
    assert (int((~listing.test).sum()), int(listing.test.sum())) == (train, test)
    assert len(listing.domains) == domains
    assert classes in (None, len(listing.classes))
    if name == "clinc150":
        assert set(Counter(listing.domain.tolist()).values()) == {2250}


def test_the_embedded_requests_are_all_different_within_a_style():
    config = load_config(["data=intents_mini", "algorithm=fedavg"]).data
    found = make_source(config)
    listing = found.scan()
    texts = [found.decode(listing, i, 9).text for i in range(len(listing.keys))]
    assert len(texts) == 4 * 12 * 40
    assert len(listing.domains) == 4
    assert len(set(zip(listing.domain.tolist(), texts, strict=True))) == len(texts)
    assert sum(map(len, texts)) < 200_000


def test_texts_are_prepared_once_and_mapped(tmp_path, caplog):
    tokenizer_of("gpt2").save_pretrained(tmp_path / "tokenizer")
    told = [{"role": "user", "content": "a"}]
    rows = [{"messages": told}, {"messages": [*told, {"role": "assistant", "content": "b"}]}]
    config = load_config(
        ["data=jsonl", f"data.root={written(tmp_path, 'jsonl', rows)}", "algorithm=fedavg"]
    ).data
    config = replace(config, cache=str(tmp_path / "cache"))
    first = load(config, 32, LANGUAGE_MODELING, tokenizer=str(tmp_path / "tokenizer"))
    assert first.targets.counts.tolist() == [0, 2]
    assert "1 text of jsonl have no token that is learned" in caplog.text
    files = list((tmp_path / "cache").glob("*.arrow"))
    again = load(config, 32, LANGUAGE_MODELING, tokenizer=str(tmp_path / "tokenizer"))
    assert list((tmp_path / "cache").glob("*.arrow")) == files
    assert again.digest == first.digest
    load(config, 16, LANGUAGE_MODELING, tokenizer=str(tmp_path / "tokenizer"))
    load(replace(config, template="{prompt} -"), 32, LANGUAGE_MODELING, tokenizer=str(tmp_path / "tokenizer"))
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 3
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        load(config, 32)


def test_a_row_is_named_by_its_file_and_its_place_there(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        path = written(tmp_path, "jsonl", rows[:1] if "0-of" in name else rows, name)
    with pytest.raises(DataError, match=f"row 2 of {path} has no value in 'completion'"):
        source("jsonl", tmp_path).scan()


def test_roles_of_tools_and_developers_are_known():
    told = [{"role": role, "content": "x"} for role in ("developer", "user", "tool", "assistant")]
    assert [message["role"] for message in messages_of(told, "row 1")] == [
        "system",
        "user",
        "tool",
        "assistant",
    ]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
@pytest.mark.parametrize("layout", ["lines", "list", "windows"])
def test_only_a_line_feed_ends_a_line_of_json(tmp_path, mark, layout):
    rows = [{"text": f"one{mark}two {i}", "label": "ab"[i % 2]} for i in range(4)]
    lines = [json.dumps(row, ensure_ascii=ord(mark) < 32) for row in rows]
    text = {"lines": "\n".join(lines), "list": f"[{','.join(lines)}]", "windows": "\r\n".join(lines) + "\r\n"}
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + text[layout].encode())
    found = source("jsonl", tmp_path / "x.jsonl")
    assert [each.text for each in texts_of(found, found.scan())] == [row["text"] for row in rows]


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\ud83d"])
def test_half_of_an_emoji_is_named_with_its_line(tmp_path, half):
    whole = '{"text": "\\ud83d\\ude00", "label": "a"}'
    lines = (whole, '{"text": "a HALF b", "label": "b"}'.replace("HALF", half))
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"line 2 of .*x.jsonl has half of a character"):
        source("jsonl", tmp_path / "x.jsonl").scan()
    (tmp_path / "y.jsonl").write_text(whole + "\n" + whole.replace('"a"', '"b"'))
    assert len(source("jsonl", tmp_path / "y.jsonl").scan().keys) == 2


TEXTS = ['he said "hi"', "plain", '"', "", "tab\there", "two\nlines", '"quoted"', "O'Neil", 'inch 5"']


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.one_of(st.sampled_from(TEXTS), st.text('ab"\t '), st.text('ab"\n ')), min_size=2, max_size=6
    )
)
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_tsv_that_a_program_wrote_with_quotes_is_read_as_it_was(tmp_path, texts, quoting):
    table = [{"text": f"a{text}", "label": "ab"[place % 2]} for place, text in enumerate(texts)]
    with (tmp_path / "x.tsv").open("w", newline="") as file:
        out = csv.DictWriter(file, ("text", "label"), delimiter="\t", quoting=quoting)
        out.writeheader()
        out.writerows(table)
    found = source("tsv", tmp_path / "x.tsv")
    assert [each.text for each in texts_of(found, found.scan())] == [row["text"] for row in table]


@pytest.mark.parametrize("text", ['a "b" c', '"great', '"Why?" he said', '"Why?"', 'so"', '"'])
def test_quotes_of_glue_are_part_of_the_text(tmp_path, text):
    (tmp_path / "x.tsv").write_text(f"text\tlabel\n{text}\t0\nplain\t1\n")
    found = source("tsv", tmp_path / "x.tsv")
    assert texts_of(found, found.scan())[0].text == text


def test_a_long_text_is_read_and_the_limit_of_the_module_csv_is_as_before(tmp_path):
    long = "word " * 40_000
    for kind, mark in (("csv", ","), ("tsv", "\t")):
        (tmp_path / f"x.{kind}").write_text(f"text{mark}label\n{long}{mark}a\nshort{mark}b\n")
        found = source(kind, tmp_path / f"x.{kind}")
        assert texts_of(found, found.scan())[0].text == long
    assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.5, 1.0, 0.0], "row 1 of .* has the label '?0.5"),
        ([0, 1, -1], "row 3 of .* has the label '?-1"),
        (["pos", "neg", "pos "], "row 3 of .* has the label 'pos '"),
        (["pos", None, "neg"], "row 2 of .* has no value in 'label'"),
        ([[0], [1], [0]], "row 1 of .* has a list in 'label', which is no text"),
    ],
)
def test_labels_that_are_no_classes_are_refused_in_every_format(tmp_path, kind, labels, words):
    if kind == "csv" and labels[0] == [0]:
        return  # a CSV has texts only
    rows = [{"text": f"t {i}", "label": label} for i, label in enumerate(labels)]
    with pytest.raises(DataError, match=words):
        source(kind, written(tmp_path, kind, rows)).scan()


@pytest.mark.parametrize("missing", [None, float("nan"), "", " "])
@pytest.mark.parametrize("part", ["client", "domain"])
def test_a_row_of_a_file_without_a_client_is_named(tmp_path, missing, part):
    rows = [{"text": f"t {i}", "label": "ab"[i % 2], part: "p"} for i in range(4)]
    rows[2][part] = missing
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=f"data.columns.{part}: row 3 of .* has no value in '{part}'"):
        source("jsonl", path, columns={part: part}).scan()


def test_the_order_of_a_dictionary_column_is_that_of_the_outputs(tmp_path):
    names, codes = ["World", "Sports", "Business"], [2, 0, 1, 0]
    column = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(names))
    table = pa.table({"text": [f"t {code}" for code in codes], "label": column})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    listing = source("parquet", tmp_path / "x.parquet").scan()
    assert listing.classes == tuple(names)
    assert listing.labels.tolist() == codes


def test_a_header_with_blanks_is_explained(tmp_path):
    (tmp_path / "x.csv").write_text("text, label\nhello, a\nbye, b\n")
    with pytest.raises(
        ConfigError, match="the header has ' label', with blanks around the name; write 'label'"
    ):
        source("csv", tmp_path / "x.csv").scan()
    found = source("csv", tmp_path / "x.csv", columns={"label": " label"}).scan()
    assert found.classes == (" a", " b")


def test_columns_are_those_of_all_rows(tmp_path):
    path = written(tmp_path, "jsonl", [{"text": "a"}, {"text": "b", "label": "x"}])
    with pytest.raises(DataError, match=r"row 1 of .* has no value in 'label'"):
        source("jsonl", path).scan()
    for name, header in {"train": "text,label", "test": "text,lab"}.items():
        (tmp_path / f"{name}.csv").write_text(f"{header}\nhello,x\nbye,y\n")
    with pytest.raises(DataError, match=r"row 1 of .*test\.csv has no value in 'label'"):
        source("csv", tmp_path).scan()


def test_columns_that_are_not_used_are_said(tmp_path):
    path = written(tmp_path, "jsonl", [{"text": "a", "label": "x", "client": 1, "split": "test"}] * 2)
    assert source("jsonl", path).said == "columns that are not used: client, split"
    assert not source("jsonl", written(tmp_path, "jsonl", [{"text": "a", "label": "x"}], "two")).said


def test_tables_of_other_formats_are_counted(tmp_path, caplog):
    written(tmp_path, "jsonl", [{"text": "a", "label": "x"}], "test")
    (tmp_path / "train.csv").write_text("text,label\nhello,x\nbye,y\n")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "more.csv").write_text("text,label\nhello,x\n")
    source("csv", tmp_path).scan()
    assert "not used: 2 files of" in caplog.text


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("client", (1, "1"), "1 and '1' are both there in column 'who'"),
        ("client", (1, 1.0), "1 and 1.0 are both there in column 'who'"),
        ("client", ("ann", "ann "), "have one name"),
        ("domain", (True, 1), "have one name"),
        ("domain", ("p/q", "p-q"), "are one name, as / becomes - in it"),
        ("client", ([1], [2]), "a client is a text or a number"),
    ],
)
def test_names_that_would_be_one_are_refused(tmp_path, part, values, words):
    rows = [{"text": f"t{place}", "label": "x", "who": value} for place, value in enumerate(values)]
    with pytest.raises(DataError) as caught:
        source("jsonl", written(tmp_path, "jsonl", rows), columns={part: "who"}).scan()
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_without_rows_or_in_another_encoding_says_so(tmp_path, kind):
    path = tmp_path / f"mails.{kind}"
    path.write_text("text,label\n" if kind == "csv" else "")
    with pytest.raises(DataError, match="has no rows"):
        source(kind, path).scan()
    path.write_bytes("text,label\nhé,x\n".encode("latin-1"))
    with pytest.raises(DataError, match="save it as UTF-8"):
        source(kind, path).scan()


def test_names_in_bytes_and_doubled_columns_of_parquet(tmp_path):
    rows = [{"text": "a", "label": "x", "who": b"ann"}, {"text": "b", "label": "y", "who": b"bob"}]
    assert source("parquet", written(tmp_path, "parquet", rows), columns={"client": "who"}).scan().owners == [
        "ann",
        "bob",
    ]
    path = tmp_path / "two.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "text", "label"]), path)
    with pytest.raises(DataError, match="has two columns 'text'"):
        source("parquet", path).scan()


def test_prompt_and_completion_in_json_are_messages(tmp_path):
    asked, told = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    rows = [{"prompt": json.dumps(asked), "completion": json.dumps(told)}]
    reader = source("jsonl", written(tmp_path, "jsonl", rows))
    assert reader.decode(reader.scan(), 0, 0).messages == (*asked, *told)
    plain = source("jsonl", written(tmp_path, "jsonl", [{"prompt": "[1]", "completion": "[{}]"}], "plain"))
    assert plain.decode(plain.scan(), 0, 0).answer == "[{}]"
