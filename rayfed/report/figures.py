"""Pictures of a run, drawn from its tables."""

from __future__ import annotations

from pathlib import Path

from rayfed.report.files import write_whole


def accuracy_by_domain(folder: Path) -> Path | None:
    """Accuracy of every domain and their mean over the rounds; None where nothing was scored."""
    import matplotlib as mpl

    mpl.use("Agg")
    import pyarrow.parquet as pq
    from matplotlib import pyplot as plt

    table = folder / "clients.parquet"
    rows = pq.read_table(table).to_pylist() if table.exists() else []
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["exchange"] in ("report_domains", "report_held_out") and row["metric"] == "accuracy":
            suffix = " (held out)" if row["exchange"] == "report_held_out" else ""
            key = (row["model"], row["client"] + suffix)
            curves.setdefault(key, []).append((row["round"], 100 * row["value"]))
    if not curves:
        return None
    models = list(dict.fromkeys(model for model, _ in curves))
    figure, axes = plt.subplots(1, len(models), figsize=(6.4 * len(models), 4), squeeze=False, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        for (owner, domain), points in curves.items():
            if owner == model:
                style = "--" if domain.endswith("(held out)") else "-"
                axis.plot(*zip(*points, strict=True), style, marker=".", label=domain)
        axis.set(xlabel="round", ylabel="test accuracy, %", title=f"{model} model", ylim=(0, 100))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    (folder / "figures").mkdir(exist_ok=True)
    path = folder / "figures" / "accuracy.png"
    write_whole(path, lambda p: figure.savefig(p, dpi=120, format="png"))
    plt.close(figure)
    return path
