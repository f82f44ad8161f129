"""The note on differential privacy below the tables of a run."""

import pytest

from rayfed.report.final_table import privacy_notes

EARLIER = {"round": 4, "epsilon": 3.0, "delta": 0.01}
ONLY = "; of this run alone, and only towards those who do not know its seed: the noise is drawn from it"
LAST = {"round": 5, "epsilon": 4.5512, "delta": 1 / 150}


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("server", "noise added by the server to the mean; counted by prv"),
        (
            "client",
            "of one that takes part in every round; noise added by each client to its own answer; "
            "counted by prv",
        ),
    ],
)
def test_it_says_epsilon_and_delta_after_the_last_round_and_where_the_noise_was_added(where, words):
    config = {"privacy": {"noise_at": where, "accountant": "prv"}}
    [note] = privacy_notes(config, [EARLIER, LAST])
    assert (
        note == f"differential privacy of clients: epsilon 4.55 at delta 0.00667 after round 5; {words}{ONLY}"
    )
    config["privacy"]["delta"] = "auto"
    origin = {"server": "1 / (10 x clients)", "client": "1e-5"}[where]
    [note] = privacy_notes(config, [LAST])
    assert f"at delta 0.00667 (privacy.delta=auto: {origin}) after round 5" in note


def test_without_noise_there_is_no_note():
    assert [*privacy_notes({}, [{"round": 1}])] == [*privacy_notes({}, [])] == []
