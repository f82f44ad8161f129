"""Answers are those of the library's own generation, in any batch, and are scored as they are read."""

import json

import pytest
import torch
import transformers

import rayfed
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.objective import LANGUAGE_MODELING
from rayfed.record.readers import read_json
from rayfed.report import answers
from rayfed.report import answers as module
from rayfed.report.answers import greedy, last_number, likelihoods, plain, rouge_l
from rayfed.report.page.render import write_report
from tests.conftest import quickly
from tests.rayfed.engine.test_texts import folder, settings  # noqa: F401
from tests.rounding import near
from tests.tiny_models import DECODERS, save

PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24, 25, 26], [5, 9, 30, 31]]
END = 3


@pytest.mark.parametrize("family", DECODERS)
def test_every_row_is_what_the_library_generates(tmp_path, monkeypatch, family):
    name = save(family, tmp_path, language=True, seed=5, initializer_range=0.4)
    model = build_backbone(ModelConfig(name=name), 1, 0, LANGUAGE_MODELING).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    plan = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=END, pad_token_id=0)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plan)[0].tolist()
        written = out[len(prompt) :]
        expected.append(written[: written.index(END)] if END in written else written)
    assert greedy(model, PROMPTS, 12, END) == expected
    assert len({tuple(row) for row in expected}) > 1
    monkeypatch.setattr(module, "BATCH", 1)
    assert greedy(model, PROMPTS, 12, END) == expected


def test_an_answer_is_over_at_its_end_while_others_go_on(tmp_path):
    name = save("gpt2", tmp_path, language=True, seed=5, initializer_range=0.4)
    model = build_backbone(ModelConfig(name=name), 1, 0, LANGUAGE_MODELING).eval()
    whole = greedy(model, PROMPTS, 12, -1)
    end = next(row[3] for row in whole if any(row[3] not in other for other in whole))
    cut = [row[: row.index(end)] if end in row else row for row in whole]
    assert {len(row) == 12 for row in cut} == {True, False}
    assert greedy(model, PROMPTS, 12, end) == cut


@pytest.mark.parametrize("family", quickly(DECODERS, ["gpt2"]))
def test_candidates_have_the_mean_log_likelihood_of_their_tokens_in_the_library(tmp_path, family):
    name = save(family, tmp_path, language=True, seed=5, initializer_range=0.4)
    model = build_backbone(ModelConfig(name=name), 1, 0, LANGUAGE_MODELING).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    candidates = [[7, END], [9, 30, 31, END], [20, END], *([place, 5, END] for place in range(4, 11))]
    assert len(candidates) > module.BATCH
    for prompt in PROMPTS:
        with torch.no_grad():
            expected = []
            for own in candidates:
                ids = torch.tensor([[*prompt, *own]])
                labels = torch.tensor([[-100] * len(prompt) + own])
                expected.append(-theirs(input_ids=ids, labels=labels).loss)
        found = likelihoods(model, prompt, candidates)
        near(torch.tensor(found), torch.stack(expected), 3000, 10.0)
        whole = likelihoods(model, [5] * model.size + prompt, candidates)
        longest = max(map(len, candidates))
        assert whole == likelihoods(model, ([5] * model.size + prompt)[longest - model.size :], candidates)
    with pytest.raises(ConfigError, match="--choices: an answer has"):
        likelihoods(model, [5], [[5] * model.size, [7]])


def test_scores():
    assert plain(" The Answer. ") == plain("the answer")
    assert last_number("72 = 3 * 24\n#### 72") == last_number("it is 72.") == 72
    assert last_number("-3") == -3
    assert last_number("1,000.50") == 1000.5
    assert rouge_l("a b c d", "a c d") == pytest.approx(6 / 7)
    assert rouge_l("a b", "b a") == 0.5
    assert rouge_l("", "") == 1
    assert rouge_l("a", "") == 0


def test_the_report_gets_the_answers(folder, cache, tmp_path, capsys):  # noqa: F811
    run = tmp_path / "run"
    rayfed.simulate([*settings(folder, cache, "gpt2-lm", "algorithm=fedavg"), f"output={run}"])
    for _ in range(2):
        assert answers.main([str(run), "--texts", "3", "--tokens", "5"]) == 0
    rows = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["expected"] and row["last_number"] in (0, 1) for row in rows)
    text = (run / "report.md").read_text()
    assert text.lower().count("answers of the final model") == 1
    assert rows[0]["key"] in text
    assert "exact_match %" in capsys.readouterr().out
    for choices in ("all", "0 1|1 1|no"):
        assert answers.main([str(run), "--texts", "9", "--tokens", "5", "--choices", choices]) == 0
        rows = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
        named = {row["expected"] for row in rows} if choices == "all" else {"0 1", "1 1"}
        for row in rows:
            right = int(row["chosen"] == row["expected"])
            assert row["choice"] == (right if row["expected"] in named else None)
        assert "choice %" in capsys.readouterr().out
    assert "- chosen: `" in (run / "report.md").read_text()
    assert not (run / "report.html").exists()
    write_report([run], run / "report.html")
    [section] = [
        part for part in read_json(run / "report.json", dict)["sections"] if part["name"] == "Answers"
    ]
    assert len(section["parts"][1]["rows"]) == len(rows)
    assert answers.main([str(run), "--texts", "2", "--tokens", "5"]) == 0  # and the page has the new ones
    [section] = [
        part for part in read_json(run / "report.json", dict)["sections"] if part["name"] == "Answers"
    ]
    assert len(section["parts"][1]["rows"]) == 2
    assert answers.main([str(run), "--tokens", "5", "--choices", "yes"]) == 2
    assert "--choices: 'yes' are 1 different answers" in capsys.readouterr().err
    assert answers.main([str(run), "--tokens", "64"]) == 2
    assert "--tokens: 64" in capsys.readouterr().err


def test_answers_are_compared_with_whole_references_and_what_lowers_scores_is_counted(
    folder,  # noqa: F811
    cache,
    tmp_path,
    capsys,
):
    words = " ".join(["card"] * 20)
    file = tmp_path / "long.jsonl"
    rows = [{"prompt": words if i % 3 else "", "completion": f"{words} {i}"} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [text for text in settings(folder, cache, "gpt2-lm", "algorithm=fedavg") if "columns" not in text]
    own = [text for text in own if not text.startswith(("data.root", "data.partition", "data.test"))]
    run = tmp_path / "run"
    args = (*own, f"data.root={file}", "model.size=16", "data.test=6", "data.limit=9", f"output={run}")
    rayfed.simulate(args)
    assert answers.main([str(run), "--texts", "9", "--tokens", "5"]) == 0
    found = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert all(row["expected"].split() == [*["card"] * 20, row["expected"].split()[-1]] for row in found)
    empty = sum(not row["prompt"].strip() for row in found)
    assert 0 < empty < len(found) == 6
    out = " ".join(capsys.readouterr().out.split())
    assert f"{empty} of 6 texts have no prompt" in out
    assert f"{6 - empty} of 6 texts have a prompt that was cut" in out
    assert "6 of 6 texts have an expected answer of more than --tokens tokens" in out
    facts = json.loads((run / "environment.json").read_text())
    assert facts["texts_cut"].startswith("cut at model.size=16 tokens, of 9 texts: the answer of 9 (100 %)")


def test_texts_without_any_prompt_are_refused(folder, cache, tmp_path, capsys):  # noqa: F811
    file = tmp_path / "plain.jsonl"
    file.write_text("".join(json.dumps({"text": f"card {i}"}) + "\n" for i in range(12)))
    own = [text for text in settings(folder, cache, "gpt2-lm", "algorithm=fedavg") if "columns" not in text]
    own = [text for text in own if not text.startswith(("data.root", "data.partition"))]
    run = tmp_path / "run"
    rayfed.simulate([*own, f"data.root={file}", f"output={run}"])
    assert answers.main([str(run), "--tokens", "5"]) == 2
    assert "data: no test text of 'jsonl' has a prompt" in capsys.readouterr().err
