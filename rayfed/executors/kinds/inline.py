"""All clients one after the other in the process of the command, so that a breakpoint works."""

from __future__ import annotations

from rayfed.executors.inline import InlineExecutor
from rayfed.executors.kinds.base import ExecutorKind

EXECUTOR = ExecutorKind(make=InlineExecutor)
