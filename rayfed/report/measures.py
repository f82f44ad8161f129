"""Draws measures of finished runs as bars, or over their numbers of trained parameters, or over the rounds.

For the papers' figures that compare rows: FedCLIP's Figure 3, FFT-GP's Figure 4 and FedRA's Figure 4.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from rayfed.errors import ConfigError, unknown
from rayfed.record.folder import how_to_go_on
from rayfed.record.readers import STUDY
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import style
from rayfed.report.method_runs import runs_in
from rayfed.report.protocols import MEASURES, scores
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say
from rayfed.terminal.exit_code import run_guarded
from rayfed.user_files import check_run_folder, user_folder

USAGE = """\
python -m rayfed.report.measures RUN [RUN ...] [--names a,b]
    [--show generalization,personal] [--over parameters] [--debug]

Draws measures of finished runs as bars, or as curves over their numbers of
trained parameters or over the rounds. A study has a bar or a curve for each of
its methods, the mean over its seeds and parts. For example
  python -m rayfed.report.measures runs/one runs/two --names FedCLIP,FedAvg
  python -m rayfed.report.measures runs/x1 runs/x2 runs/x4 --over parameters
  python -m rayfed.report.measures runs/a runs/b --over rounds --show loss
"""
PARAMETERS = "parameters"
TITLES = {PARAMETERS: "trained parameters", **MEASURES, "loss": "test loss"}
"""Measures that can be drawn, with their titles."""
OVER = ("runs", PARAMETERS, "rounds")


Runs: TypeAlias = Sequence[Path]
"""Folders of the runs behind one bar or curve, whose mean it shows."""


def rows_of(folder: Path) -> dict[str, Runs]:
    """The runs in a folder, by the method of a study; of a folder of one run, the name is empty.

    Raises:
        ConfigError: There is no run, or no run of the study is finished.
    """
    if not (folder / STUDY).exists():
        check_run_folder(folder)
        return {"": (folder,)}
    rows: dict[str, list[Path]] = {}
    for seed in runs_in(folder).seeds:
        for _, method, path in seed.finished().each():
            rows.setdefault(method, []).append(path)
    if not rows:
        raise ConfigError(
            f"{str(folder)!r} is a study of which no run is finished; start it again, and it goes on"
        )
    return dict(rows)


def measures_of(runs: Runs) -> dict[str, float]:
    """Measures of finished runs, by name: their means.

    The scores are those of the selected round, as in the tables of `protocol=leave_one_out`, in percent. A
    run without validation has its last round.

    Raises:
        ConfigError: A folder is not that of a finished run.
    """
    numbers: dict[str, list[float]] = {}
    for run in runs:
        if not (run / "clients.parquet").exists():
            raise ConfigError(f"{str(run)!r} is not the folder of a finished run; {how_to_go_on(run)}")
        recorded = RecordedRun(run, "validation")
        for name, value in _scores(recorded).items():
            numbers.setdefault(name, []).append(value)
        numbers.setdefault(PARAMETERS, []).append(float(recorded.fact("numbers_trained")))
    return {name: fmean(values) for name, values in numbers.items()}


def _scores(run: RecordedRun) -> dict[str, float]:
    """Scores of one run in its selected and its last evaluated round, in percent, by name of MEASURES."""
    best = scores(run, run.reported)[1]
    last = {f"last_{name}": value for name, value in scores(run, run.reported_by("last"))[1].items()}
    return {name: 100 * value for name, value in {**best, **last}.items() if name in MEASURES}


@style.in_style
def bars(runs: Mapping[str, Mapping[str, float]], show: Sequence[str]) -> style.Drawing:
    """One panel per measure, one bar per run; numbers of parameters on a logarithmic axis.

    Args:
        runs: Measures of each run (`measures_of`), by its name.
        show: Names of the measures.
    """
    figure, axes = style.canvas(1, len(show), (1.6 + len(show) * (1.2 + 0.6 * len(runs)), 3.4))
    known = style.looks(runs)
    for axis, measure in zip(axes[0], show, strict=True):
        values = [run[measure] for run in runs.values()]
        drawn = axis.bar(range(len(runs)), values, color=[known[name].colour for name in runs])
        axis.bar_label(
            drawn, [f"{value:,.0f}" if measure == PARAMETERS else f"{value:.1f}" for value in values]
        )
        axis.set_xticks(range(len(runs)), list(runs))
        axis.set_title(TITLES[measure])
        if measure == PARAMETERS:
            axis.set_yscale("log")
        else:
            style.percent_axis(axis, "score")
    style.heading(figure, "Measures of the runs")
    return style.Drawing("measures", figure)


@style.in_style
def curves(points: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], over: str) -> style.Drawing:
    """One panel per measure, one curve per group of runs.

    Args:
        points: Pairs (x, y) by name of the curve, by measure.
        over: `parameters` or `rounds`.
    """
    figure, axes = style.canvas(1, len(points), (2.0 + 3.6 * len(points), 3.4))
    known = style.looks(dict.fromkeys(name for of in points.values() for name in of))
    for axis, (measure, of) in zip(axes[0], points.items(), strict=True):
        for name, pairs in of.items():
            look = known[name]
            axis.plot(*zip(*sorted(pairs), strict=True), look.line, color=look.colour, marker=look.marker)
        axis.set(title=TITLES[measure], ylabel="score in percent" if measure in MEASURES else TITLES[measure])
        axis.set(xlabel="round" if over == "rounds" else TITLES[PARAMETERS])
        axis.grid(axis="y", alpha=0.3)
        if over == PARAMETERS:
            axis.set_xscale("log")
    style.heading(figure, f"Measures over {'the rounds' if over == 'rounds' else TITLES[PARAMETERS]}")
    style.legend(figure, [style.line_of(look, name) for name, look in known.items()])
    return style.Drawing("measures", figure)


def over_parameters(
    rows: Mapping[str, Runs], show: Sequence[str]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Points of `curves` over the numbers of trained parameters: one curve for each algorithm."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = {measure: {} for measure in show}
    for runs in rows.values():
        own = measures_of(runs)
        algorithm = RecordedRun(runs[0]).method
        for measure in show:
            _check(runs[0], own, measure)
            points[measure].setdefault(algorithm, []).append((own[PARAMETERS], own[measure]))
    return points


def over_rounds(
    rows: Mapping[str, Runs], show: Sequence[str]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Points of `curves` over the rounds: one curve for each row, at the rounds that all of its runs have.

    Raises:
        ConfigError: A measure other than the loss is wanted, or a run has no loss.
    """
    if list(show) != ["loss"]:
        raise ConfigError(f"--show: {','.join(show)} cannot be drawn over the rounds; choose loss")
    points = {}
    for name, runs in rows.items():
        losses = [_losses(folder) for folder in runs]
        common = sorted(set.intersection(*(set(own) for own in losses)))
        points[name] = [(float(round_), fmean(own[round_] for own in losses)) for round_ in common]
    return {"loss": points}


def _losses(folder: Path) -> dict[int, float]:
    """The test loss of a run, by round."""
    rows = RecordedRun(folder).rounds
    losses = {row["round"]: row["loss"] for row in rows if row.get("loss") is not None}
    if not losses:
        raise ConfigError(f"--show: loss is not in the rounds of {str(folder)!r}; set evaluation.every=1")
    return losses


def _check(folder: Path, measures: Mapping[str, float], measure: str) -> None:
    if measure not in measures:
        raise ConfigError(
            f"--show: {measure!r} is not in {str(folder)!r}; choose one of {', '.join(measures)}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Draw from the command line. Exit code: 0 drawn, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.measures", USAGE)
    parser.add_argument("runs", type=user_folder, nargs="+", help="folders of finished runs")
    parser.add_argument("--names", help="names of the runs, separated by commas; else those of the folders")
    parser.add_argument("--show", default=PARAMETERS, help=f"measures: {', '.join(TITLES)}")
    parser.add_argument("--over", choices=OVER, default="runs", help="what is on the horizontal axis")
    args = parser.parse_args(argv)

    def work() -> None:
        show = args.show.split(",")
        for measure in show:
            if measure not in TITLES:
                raise ConfigError(unknown("--show", measure, list(TITLES)))
        found = [(folder, method, runs) for folder in args.runs for method, runs in rows_of(folder).items()]
        alone = len(args.runs) == 1
        usual = [method if method and alone else f"{f.name} {method}".strip() for f, method, _ in found]
        names = args.names.split(",") if args.names else usual
        if len(set(names)) != len(found):
            raise ConfigError(f"--names: {', '.join(names)}; give each of the {len(found)} runs its own")
        rows = dict(zip(names, (runs for _, _, runs in found), strict=True))
        say(str(draw(rows, show, args.over).save(args.runs[0])))

    return run_guarded(work, args.debug, "the runs themselves are unchanged")


def draw(rows: Mapping[str, Runs], show: Sequence[str], over: str) -> style.Drawing:
    """Draw measures of finished runs.

    Args:
        rows: Folders of the runs of each bar or curve, by its name.
        show: Names of the measures.
        over: One of OVER.
    """
    if over == "rounds":
        return curves(over_rounds(rows, show), over)
    if over == PARAMETERS:
        return curves(over_parameters(rows, show), over)
    measures = {name: measures_of(runs) for name, runs in rows.items()}
    for name, own in measures.items():
        for measure in show:
            _check(rows[name][0], own, measure)
    return bars(measures, show)


if __name__ == "__main__":
    sys.exit(main())
