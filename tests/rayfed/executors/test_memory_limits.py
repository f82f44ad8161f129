"""Limits of control groups count: of the own group and of all around it, in both versions."""

import pytest

from rayfed.executors.memory_limits import _available, free_memory, own_groups


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(str(text))


def test_the_groups_of_a_process_are_found_with_all_around_them(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu,cpuacct:/slurm\n4:memory:/slurm/job_1/step_0\n0::/user.slice/a.scope\n")
    found = list(own_groups(groups, tmp_path))
    assert found[:4] == [
        tmp_path / "memory" / part for part in ("slurm/job_1/step_0", "slurm/job_1", "slurm", ".")
    ]
    assert found[4:7] == [tmp_path / part for part in ("user.slice/a.scope", "user.slice", ".")]
    assert not any("cpu" in str(folder) for folder in found)


@pytest.mark.parametrize("limited", ["slurm/job_1/step_0", "slurm/job_1", "slurm"])
def test_the_smallest_limit_of_version_1_counts(limited, tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/slurm/job_1/step_0\n")
    for part in ("slurm/job_1/step_0", "slurm/job_1", "slurm", ""):
        limit = 1_500_000_000 if part == limited else 2**63 - 4096
        write(tmp_path / "memory" / part, memory__limit_in_bytes=limit, memory__usage_in_bytes=600_000_000)
    assert free_memory(groups, tmp_path) == 900_000_000
    stat = "cache 9\ntotal_inactive_file 250000000\n"
    write(tmp_path / "memory" / limited, memory__stat=stat)
    assert free_memory(groups, tmp_path) == 1_150_000_000


def test_a_limit_of_version_2_counts_and_max_is_none(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("0::/system.slice/run.service\n")
    write(tmp_path / "system.slice/run.service", memory__max="max", memory__current=7)
    without = free_memory(groups, tmp_path)
    assert abs(without - _available()) < 0.2 * _available()
    write(tmp_path / "system.slice", memory__max=2_000_000_000, memory__current=500_000_000)
    assert free_memory(groups, tmp_path) == 1_500_000_000


def test_more_used_than_allowed_is_no_free_memory(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("0::/a\n")
    write(tmp_path / "a", memory__max=100, memory__current=200)
    assert free_memory(groups, tmp_path) == 0
    assert free_memory(tmp_path / "absent", tmp_path / "absent") > 0
