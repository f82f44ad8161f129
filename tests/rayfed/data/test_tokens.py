"""Texts become tokens as their parts say, with what is learned by construction."""

from dataclasses import dataclass

import numpy as np
import pytest

from rayfed.data.source import Listing
from rayfed.data.text import Text
from rayfed.data.tokenizer import digest_of, load_tokenizer
from rayfed.data.tokens import Tokenized
from rayfed.errors import ConfigError
from tests.tiny_models import tokenizer_of

END = 3
BEGIN = 2


@dataclass
class Texts:
    texts: list
    task: str = "language_modeling"
    name: str = "some"

    def fingerprint(self):
        return "some"

    def scan(self):
        n = len(self.texts)
        numbers = np.zeros(n, np.int64)
        return Listing(
            name="some",
            classes=("text",),
            domains=("all",),
            keys=[f"all/text/{i}" for i in range(n)],
            labels=numbers,
            domain=numbers,
            test=numbers.astype(bool),
            fingerprint="some",
        )

    def decode(self, listing, index, size):
        return self.texts[index]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    for family in ("bert", "gpt2", "llama"):
        tokenizer_of(family).save_pretrained(root / family)
    return root


def tokens(folder, text, size=100, task="language_modeling", **options):
    source = Tokenized(source=Texts([text], task), tokenizer=str(folder), **options)
    return source.decode(source.scan(), 0, size)


def pieces(folder, text):
    return load_tokenizer(str(folder))(text, add_special_tokens=False)["input_ids"]


def turns(*told):
    return tuple({"role": role, "content": content} for role, content in told)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_answer_is_learned_and_ends_with_the_end(folders, family):
    folder = folders / family
    found = tokens(folder, Text(text="where is my card", answer="the rate"))
    begin = [BEGIN] if family == "llama" else []
    prompt, answer = pieces(folder, "where is my card\n"), [*pieces(folder, "the rate"), END]
    assert found.ids.tolist() == [*begin, *prompt, *answer]
    assert found.learned.tolist() == [0] * (len(begin) + len(prompt)) + [1] * len(answer)


def test_an_answer_that_repeats_the_prompt_is_learned_once(folders):
    found = tokens(folders / "gpt2", Text(text="card", answer="card"), template="{prompt}")
    length = len(pieces(folders / "gpt2", "card"))
    assert found.learned.tolist() == [0] * length + [1] * (length + 1)


def test_a_template_goes_around_the_prompt(folders):
    found = tokens(folders / "gpt2", Text(text="card", answer="1"), template="is {prompt} 2: ")
    assert found.ids.tolist() == [
        *pieces(folders / "gpt2", "is card 2: "),
        *pieces(folders / "gpt2", "1"),
        END,
    ]


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-5, None)), ("right", slice(None, 5))])
def test_the_prompt_is_cut_and_not_the_answer(folders, side, kept):
    folder = folders / "llama"
    answer = [*pieces(folder, "the rate"), END]
    prompt = pieces(folder, "where is my card\n")
    found = tokens(
        folder, Text(text="where is my card", answer="the rate"), 1 + 5 + len(answer), truncate=side
    )
    assert found.ids.tolist() == [BEGIN, *prompt[kept], *answer]
    assert found.learned.sum() == len(answer)
    assert found.flaws == ("prompt",)
    assert tokens(folder, Text(text="where is my card", answer="the rate")).flaws == ()


LONG = "what is the answer to one and one"


@pytest.mark.parametrize(("size", "side"), [(9, "left"), (10, "left"), (9, "right"), (10, "right")])
def test_a_long_prompt_keeps_half_of_the_room_beside_a_long_answer(folders, size, side):
    folder = folders / "llama"
    prompt, answer = pieces(folder, f"{LONG}\n"), pieces(folder, LONG)
    half = size // 2  # of the tokens after the first, the larger half
    found = tokens(folder, Text(text=LONG, answer=LONG), size, truncate=side)
    kept = prompt[-half:] if side == "left" else prompt[:half]
    assert found.ids.tolist() == [BEGIN, *kept, *answer[: size - 1 - half]]
    assert found.learned.tolist() == [0] * (1 + half) + [1] * (size - 1 - half)
    assert found.flaws == ("prompt", "answer")


def test_a_short_prompt_is_whole_before_an_answer_that_is_cut(folders):
    prompt, answer = pieces(folders / "llama", "one\n"), pieces(folders / "llama", LONG)
    found = tokens(folders / "llama", Text(text="one", answer=LONG), 2 * len(prompt) + 1)
    assert found.ids.tolist() == [BEGIN, *prompt, *answer[: len(prompt)]]
    assert found.flaws == ("answer",)
    assert tokens(folders / "llama", Text(text="where is my card"), 3).flaws == ("text",)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_is_had_as_a_whole_and_its_prompt_shortened(folders, side):
    folder = folders / "llama"
    text = Text(text=LONG, answer=LONG)
    source = Tokenized(source=Texts([text]), tokenizer=str(folder), truncate=side)
    prompt = pieces(folder, f"{LONG}\n")
    assert source.whole(0) == ([BEGIN, *prompt], [*pieces(folder, LONG), END])
    kept = prompt[-3:] if side == "left" else prompt[:3]
    assert source.shortened([BEGIN, *prompt], 4) == [BEGIN, *kept]
    assert source.shortened([BEGIN, *prompt], 99) == [BEGIN, *prompt]


def test_messages_without_a_template_learn_what_the_assistant_says(folders):
    told = [("user", "where is my card"), ("assistant", "0 1"), ("user", "what"), ("assistant", "2")]
    found = tokens(folders / "gpt2", Text(messages=turns(*told)))
    folder = folders / "gpt2"
    asked = [pieces(folder, f"user: {text}\n") for text in ("where is my card", "what")]
    said = [[*pieces(folder, text), END] for text in ("0 1", "2")]
    before = pieces(folder, "assistant: ")
    assert found.ids.tolist() == [*asked[0], *before, *said[0], *asked[1], *before, *said[1]]
    learned = found.ids[found.learned == 1].tolist()
    assert learned == [*said[0], *said[1]]


def test_messages_with_a_template_learn_what_it_puts_after_the_prompt(folders, tmp_path):
    tokenizer = tokenizer_of("gpt2")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}> {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant> {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    found = tokens(tmp_path, Text(messages=turns(("user", "card"), ("assistant", "0 1"))))
    assert found.ids.tolist() == pieces(tmp_path, "user> card</s>assistant> 0 1</s>")
    assert found.ids[found.learned == 1].tolist() == [*pieces(tmp_path, " 0 1"), END]  # one token has " 0"


def test_an_empty_answer_and_one_without_an_end_are_marked(folders, tmp_path):
    assert tokens(folders / "gpt2", Text(text="card", answer="")).flaws == ("empty",)
    tokenizer = tokenizer_of("gpt2")
    for end, flaws in (("</s>", ()), ("!", ("endless",))):
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.role }}> {{ m.content }}" + end + "{% endfor %}"
            "{% if add_generation_prompt %}assistant> {% endif %}"
        )
        tokenizer.save_pretrained(tmp_path)
        assert tokens(tmp_path, Text(messages=turns(("user", "card"), ("assistant", "0 1")))).flaws == flaws


def test_without_an_answer_the_whole_text_is_learned(folders):
    found = tokens(folders / "llama", Text(text="my card"))
    assert found.ids.tolist() == [BEGIN, *pieces(folders / "llama", "my card"), END]
    assert found.learned.tolist() == [0, *[1] * (len(found.ids) - 1)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_to_classify_keeps_its_special_tokens(folders, side):
    found = tokens(folders / "bert", Text(text="where is my card"), 6, "text_classification", truncate=side)
    own = pieces(folders / "bert", "where is my card")
    assert found.ids.tolist() == [BEGIN, *(own[:4] if side == "right" else own[-4:]), END]
    assert found.flaws == ("text",)
    pair = tokens(folders / "bert", Text(text="card", pair="rate"), 50, "text_classification")
    assert pair.flaws == ()
    assert pair.ids.tolist().count(END) == 2


def test_the_fingerprint_changes_with_whatever_changes_tokens(folders):
    def of(family="gpt2", **options):
        return Tokenized(source=Texts([]), tokenizer=str(folders / family), **options).fingerprint()

    plain = of()
    assert plain == of()
    assert len({plain, of("llama"), of(template="{prompt}"), of(truncate="right")}) == 4
    tokenizer = load_tokenizer(str(folders / "gpt2"))
    before = digest_of(tokenizer)
    tokenizer("card", truncation=True, max_length=2)
    assert digest_of(tokenizer) == before


def test_a_tokenizer_without_an_end_is_refused(folders, tmp_path):
    tokenizer = tokenizer_of("gpt2")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        tokens(tmp_path, Text(text="card", answer="1"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))
