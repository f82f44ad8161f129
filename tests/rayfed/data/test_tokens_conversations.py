"""Conversations have the tokens of the library's templates and learn what TRL learns, or are refused."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayfed.config.schema import load_config
from rayfed.data.load_dataset import with_tokens
from rayfed.data.tokenizer import digest_of, load_tokenizer
from rayfed.errors import DataError
from tests.rayfed.data.named.test_texts import source
from tests.tiny_models import tokenizer_of

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe kind<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama 3": LLAMA_3,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "hermes": HERMES,
}
ANY_ORDER = ("chatml", "llama 3", "zephyr", "hermes")
"""Those that take turns in any order."""

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def of_pieces():
    """A tokenizer that puts a mark before the first word of a text, as those of Llama 2 and Mistral do."""
    words = ["<unk>", "<s>", "</s>", *(chr(i) for i in range(33, 127)), "▁", "\n"]
    found = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {
    "bytes": lambda: tokenizer_of("gpt2"),
    "begins": lambda: tokenizer_of("llama"),
    "pieces": of_pieces,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("templates")
    for kind, make in TOKENIZERS.items():
        for name, template in {**TEMPLATES, "marked": MARKED, "thinking": THINKING}.items():
            tokenizer = make()
            tokenizer.chat_template = template
            tokenizer.save_pretrained(root / f"{kind} {name}")
    tokenizer_of("gpt2").save_pretrained(root / "plain")
    return root


def written(tmp_path, rows, kind="jsonl"):
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    else:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / f"rows.{kind}"


def tokens(folder, tmp_path, rows, kind="jsonl", **options):
    """Ids and learned flags of each row of a file."""
    reader = source(kind, written(tmp_path, rows, kind), **options)
    made = with_tokens(reader, source_config(kind), str(folder))
    return [made.decode(made.scan(), i, 10_000) for i in range(len(made.scan().keys))]


def source_config(kind):
    return load_config([f"data={kind}", "algorithm=fedavg"]).data


def chat(*told):
    return [{"role": role, "content": content} for role, content in told]


def ids_of(tokenizer, messages, **options):
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


def by_prefixes(tokenizer, messages):
    """What is learned of each turn of the assistant, as the difference of what the library writes."""
    learned = [0] * len(ids_of(tokenizer, messages))
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            before = len(ids_of(tokenizer, messages[:i], add_generation_prompt=True))
            until = len(ids_of(tokenizer, messages[: i + 1]))
            learned[before:until] = [1] * (until - before)
    return learned


TALK = chat(("user", "who?"), ("assistant", "me"), ("user", "and\n\nthen"), ("assistant", "no one, I am 0"))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_messages_have_the_tokens_of_the_template(folders, tmp_path, kind, name):
    tokenizer = AutoTokenizer.from_pretrained(folders / f"{kind} {name}")
    [found] = tokens(folders / f"{kind} {name}", tmp_path, [{"messages": TALK}])
    assert found.ids.tolist() == ids_of(tokenizer, TALK)
    if name != "mistral":  # in whose answers a token of some tokenizers has a part of the prompt
        assert found.learned.tolist() == by_prefixes(tokenizer, TALK)
    assert "me" in tokenizer.decode(found.ids[found.learned == 1])
    assert "who" not in tokenizer.decode(found.ids[found.learned == 1])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("asked", [1, 3])
def test_of_prompt_and_completion_the_completion_is_learned(folders, tmp_path, kind, name, asked):
    folder = folders / f"{kind} {name}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [
        [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in own]
        for own in (TALK[:asked], TALK[asked:])
    ]
    plain, in_parts = tokens(
        folder,
        tmp_path,
        [
            {"prompt": TALK[:asked], "completion": TALK[asked:]},
            {"prompt": parts[0], "completion": parts[1]},
        ],
    )
    assert plain.ids.tolist() == in_parts.ids.tolist() == ids_of(tokenizer, TALK)
    assert plain.learned.tolist() == in_parts.learned.tolist()
    before = len(ids_of(tokenizer, TALK[:asked], add_generation_prompt=True))
    assert plain.learned.tolist() == [0] * before + [1] * (len(plain.ids) - before)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_marks_of_the_template_say_what_is_learned(folders, tmp_path, kind):
    folder = folders / f"{kind} marked"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talks = [TALK, TALK[1:], [*TALK, *chat(("user", "bye"))]]
    for talk, found in zip(talks, tokens(folder, tmp_path, [{"messages": t} for t in talks]), strict=True):
        made = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert found.ids.tolist() == list(made["input_ids"])
        assert found.learned.tolist() == list(made["assistant_masks"])


@pytest.mark.parametrize("name", ANY_ORDER)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_assistant_that_begins_is_learned_too(folders, tmp_path, kind, name):
    folder = folders / f"{kind} {name}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = chat(("assistant", "hello"), ("user", "who?"), ("assistant", "me"))
    [found] = tokens(
        folder, tmp_path, [{"conversations": [{"from": m["role"], "value": m["content"]} for m in talk]}]
    )
    assert found.ids.tolist() == ids_of(tokenizer, talk)
    later = by_prefixes(tokenizer, talk)
    first = [max(0, own - other) for own, other in zip(found.learned.tolist(), later, strict=True)]
    assert [max(pair) for pair in zip(first, later, strict=True)] == found.learned.tolist()
    said = tokenizer.decode(found.ids[[flag == 1 for flag in first]])
    assert said.strip().startswith("hello")
    end = tokenizer.decode(ids_of(tokenizer, talk[:1])).rpartition("hello")[2]
    assert said.strip() == f"hello{end}".strip()


@pytest.mark.parametrize("name", ["gemma", "mistral"])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_what_a_template_refuses_is_named_by_its_row(folders, tmp_path, name, column):
    rows = [{"messages": TALK}, {"messages": chat(("assistant", "hello"), ("user", "who?"))}]
    if column == "prompt":
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    with pytest.raises(DataError) as caught:
        tokens(folders / f"bytes {name}", tmp_path, rows)
    assert f"row 2 of {tmp_path / 'rows.jsonl'} is refused by the template" in str(caught.value)
    assert "roles must alternate" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_writes_messages_otherwise_when_others_follow(folders, tmp_path):
    folder = folders / "bytes thinking"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [found] = tokens(folder, tmp_path, [{"messages": TALK[:2]}])
    assert found.ids.tolist() == ids_of(tokenizer, TALK[:2])
    with pytest.raises(DataError, match=r"row 1 of .* cannot be told .* message 2|row 1 of .*\(message 2\)"):
        tokens(folder, tmp_path, [{"messages": TALK}])
    [found] = tokens(folder, tmp_path, [{"prompt": TALK[:3], "completion": TALK[3:]}])
    assert found.ids.tolist() == ids_of(tokenizer, TALK)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}}
CALLING = [
    {"role": "system", "content": "count"},
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "name": "add"},
    {"role": "assistant", "content": "it is 3"},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), None])
def test_tools_and_their_calls_go_through_the_template(folders, tmp_path, kind, tools):
    folder = folders / "bytes hermes"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    told = [{**turn, "content": turn["content"] or ""} for turn in CALLING]
    listed = None if tools is None else [TOOL]
    row = {"messages": CALLING, **({} if tools is None else {"tools": tools})}
    [found] = tokens(folder, tmp_path, [row], kind)
    assert found.ids.tolist() == ids_of(tokenizer, told, tools=listed)
    said = tokenizer.decode(found.ids[found.learned == 1])
    assert '<call>{"name": "add", "arguments": {"a": 1, "b": 2}}</call>' in said
    assert "it is 3" in said
    assert "1 + 2?" not in said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": TALK[:1], "completion": "me"}, r"completion: row 1 of .* is no list of messages"),
        ({"prompt": "who?", "completion": TALK[1:2]}, r"prompt: row 1 of .* is no list of messages"),
        ({"prompt": "who?", "completion": ["me"]}, "is no list of messages"),
        ({"prompt": TALK[:1], "completion": []}, "has no message in 'completion'"),
        ({"messages": []}, "has no message in 'messages'"),
        ({"messages": chat(("user", "a"), ("assistant", None))}, "is no list of messages"),
        ({"messages": chat(("user", [{"type": "image", "url": "x"}]))}, "of type text"),
        ({"messages": chat(("user", 3))}, "is no list of messages"),
        ({"messages": chat((["user"], "a"))}, "is no list of messages"),
        ({"text": ["a", "b"]}, "has a list in 'text', which is no text"),
        ({"text": {"a": 1}}, "has an object in 'text', which is no text"),
        ({"text": None}, "has no value in 'text'"),
        ({"text": True}, "has true or false in 'text', which is no text"),
        ({"prompt": "a", "completion": {"b": 1}}, "has an object in 'completion'"),
        ({"text": "half \ud83d"}, "line 1 of .* has half of a character"),
        ({"text": "half \ud83d", "label": "a"}, "line 1 of .* has half of a character"),
        ({"prompt": "a", "completion": "\udc00"}, "has half of a character"),
        ({"messages": chat(("user", "\ud83d"), ("assistant", "b"))}, "has half of a character"),
        ({"messages": TALK[:2], "tools": "no JSON"}, "tools of row 1 .* is not JSON"),
        ({"messages": TALK[:2], "tools": [3]}, "is no list of objects that describe functions"),
    ],
)
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_what_cannot_be_learned_is_one_line_with_its_row(folders, tmp_path, row, words, name):
    with pytest.raises(DataError, match=words) as caught:
        tokens(folders / f"bytes {name}", tmp_path, [row])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row", [{"text": 12}, {"text": "12", "label": 3}, {"prompt": 0.5, "completion": 12}, {"text": ""}]
)
def test_numbers_are_texts_as_json_writes_them(folders, tmp_path, row):
    as_text = {key: str(value) for key, value in row.items()}
    one, other = (tokens(folders / "plain", tmp_path, [each])[0] for each in (row, as_text))
    assert one.ids.tolist() == other.ids.tolist()


def test_without_a_template_the_completion_is_learned(folders, tmp_path):
    folder = folders / "plain"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [part] = tokens(folder, tmp_path, [{"prompt": TALK[:3], "completion": TALK[3:]}])
    [whole] = tokens(folder, tmp_path, [{"messages": TALK}])
    assert part.ids.tolist() == whole.ids.tolist()
    assert tokenizer.decode(part.ids[part.learned == 1]) == "no one, I am 0</s>"
    assert tokenizer.decode(whole.ids[whole.learned == 1]) == "me</s>no one, I am 0</s>"
    with pytest.raises(DataError, match=r"row 1 of .* has no template of conversations to write them"):
        tokens(folder, tmp_path, [{"messages": CALLING}])


TURN = st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text("ab \n1é<|", max_size=6))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(told=st.lists(TURN, min_size=1, max_size=5), name=st.sampled_from(["chatml", "zephyr", "hermes"]))
def test_any_conversation_has_the_tokens_of_the_template(folders, tmp_path, told, name):
    folder = folders / f"bytes {name}"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [found] = tokens(folder, tmp_path, [{"messages": chat(*told)}])
    assert found.ids.tolist() == ids_of(tokenizer, chat(*told))
    answers = sum(role == "assistant" for role, _ in told)
    runs = sum(
        flag and not before for flag, before in zip(found.learned, [0, *found.learned[:-1]], strict=True)
    )
    assert runs == answers


@pytest.mark.parametrize("route", ["hub", "lists", "csv"])
def test_conversations_of_other_formats(folders, tmp_path, route):
    """In a data set of the hub's library, in one with a list of roles and one of contents, and as JSON."""
    folder = folders / "bytes chatml"
    expected = tokens(folder, tmp_path, [{"messages": TALK}] * 2)
    if route == "csv":
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerows([["messages"], [json.dumps(TALK)], [json.dumps(TALK)]])
        reader = source("csv", tmp_path / "rows.csv")
    else:
        datasets = pytest.importorskip("datasets")
        told = (
            {key: [turn[key] for turn in TALK] for key in ("role", "content")} if route == "lists" else TALK
        )
        datasets.Dataset.from_list([{"messages": told}] * 2).save_to_disk(tmp_path / "saved")
        reader = source("hf/chats", tmp_path / "saved")
    made = with_tokens(reader, source_config("jsonl"), str(folder))
    for index, one in enumerate(expected):
        found = made.decode(made.scan(), index, 10_000)
        assert (found.ids.tolist(), found.learned.tolist()) == (one.ids.tolist(), one.learned.tolist())


def test_a_row_of_a_data_set_of_the_hub_is_named(folders, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "a", "label": "x"}, {"text": None, "label": "y"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="row 2 of train of chats has no value in 'text'"):
        with_tokens(
            source("hf/chats", tmp_path / "saved"), source_config("jsonl"), str(folders / "plain")
        ).scan()


def test_other_inputs_of_the_network_are_other_tokens(folders, tmp_path):
    """Types that a tokenizer gives from now on are in no file that was prepared before."""
    before = load_tokenizer(str(folders / "plain"))
    after = load_tokenizer(str(folders / "plain"))
    after.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert digest_of(before) != digest_of(after)
