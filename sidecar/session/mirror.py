"""The mirror: the sidecar's copy of the engine's queues, brought up to date by each message.

`Mirror.update` either applies a whole step or raises `Refusal` and changes nothing.
"""

from __future__ import annotations

import numpy as np

from sidecar.policies.base import Plan
from sidecar.queues import ENTRY, RUNNING, Queues, Table, apply_batch
from sidecar.session import checks
from sidecar.session.refusal import Refusal
from sidecar.session.rows import RowFiller, blocks_of_tokens, set_progress
from slidingserve.contract.values import (
    EngineLimits,
    ErrorReason,
    Ints,
    ProgressColumns,
    RequestColumns,
    SloDefaults,
    Snapshot,
    Step,
)


class Mirror:
    """Queues of one engine.

    Attributes:
        queues: the state, for the policy to read.
        class_names: names by class index; entry 0 is "no class".
        tenant_names: the same for tenants.
    """

    def __init__(self, limits: EngineLimits, slo_defaults: SloDefaults) -> None:
        self.queues = Queues()
        self.class_names = [""]
        self.tenant_names = [""]
        self._limits = limits
        self._block_tokens = limits.kv_block_tokens
        self._last_handle = -1
        self._filler = RowFiller(slo_defaults)

    def update(self, step: Step, plan: Plan) -> None:
        """Applies a step; ``plan`` is the last answer, which the engine may have executed to the letter.

        Raises:
            Refusal: the step is wrong; nothing was changed.
        """
        _, applied_exactly, applied, progress, finished_handles, arrived = step
        if applied is not None or progress is not None:
            self._check(step)
        finished = self._finished(finished_handles) if len(finished_handles) else None
        rows = self._new_rows(arrived) if arrived is not None else None
        if applied_exactly:
            self._apply(plan.entries, plan.count, plan.victims, plan.victim_count)
        elif applied is not None:
            entries = np.empty(len(applied.handles), ENTRY)
            entries["slot"] = self.queues.slots(applied.handles)
            entries["tokens"] = applied.tokens
            victims = self.queues.slots(applied.preempted_handles)
            self._apply(entries, len(entries), victims, len(victims))
        if progress is not None:
            self._correct(progress)
        if finished is not None:
            self.queues.remove(finished_handles, finished)
        if rows is not None and arrived is not None:
            self._add(rows, arrived)

    def restore(self, snapshot: Snapshot) -> None:
        """Replaces everything by the engine's state.

        Raises:
            Refusal: the snapshot is wrong; nothing was changed.
        """
        columns = snapshot.requests
        checks.check_snapshot(snapshot, self._limits)
        checks.check_names(columns, "snapshot.requests", 1, 1)
        rows = self._filler.fill(
            columns,
            None,
            checks.longest_prompt(self._limits),
            (len(columns.class_names) + 1, len(columns.tenant_names) + 1),
        )
        assert rows is not None, "check_snapshot has checked the columns"
        set_progress(rows, snapshot.progress, snapshot.running_count, self._block_tokens)
        self.queues.clear()
        del self.class_names[1:], self.tenant_names[1:]
        self._add(rows, columns)

    def _check(self, step: Step) -> None:
        """Checks what a step says of the executed batch and of progress."""
        queues = self.queues
        if step.applied is not None:
            if step.applied_exactly:
                raise Refusal(
                    ErrorReason.INVALID_FIELD, "step.applied", "set", "leave it out when applied_exactly is true"
                )
            checks.check_applied(step.applied, "step.applied", queues)
        if step.progress is not None:
            checks.check_known(step.progress.handles, "step.progress.handles", queues)
            slots = queues.slots(step.progress.handles)
            checks.check_progress(step.progress, "step.progress", queues.requests["prompt"][slots])

    def _finished(self, handles: Ints) -> list[int] | None:
        """Returns the slots of requests that are gone."""
        slots = self.queues.find(handles)
        if slots is None:
            checks.check_known(handles, "step.finished_handles", self.queues)
        return slots

    def _new_rows(self, columns: RequestColumns) -> Table:
        longest = checks.longest_prompt(self._limits)
        names = self._name_counts(columns)
        rows = self._filler.fill(columns, self._last_handle, longest, names)
        if rows is None or max(names) > checks.MOST_NAMES or len(columns.request_ids) not in (0, len(rows)):
            checks.check_arrivals(columns, "step.arrived", self._limits, self._last_handle)
            checks.check_names(columns, "step.arrived", len(self.class_names), len(self.tenant_names))
            raise Refusal(ErrorReason.INVALID_FIELD, "step.arrived", "rows", "a column is out of its range")
        return rows

    def _name_counts(self, columns: RequestColumns) -> tuple[int, int]:
        """Returns how many classes and tenants have a name once ``columns`` is taken in."""
        return len(self.class_names) + len(columns.class_names), len(self.tenant_names) + len(columns.tenant_names)

    def _apply(self, entries: Table, count: int, victims: Ints, victim_count: int) -> None:
        apply_batch(*self.queues.arrays, entries, count, victims, victim_count, self._block_tokens)

    def _correct(self, progress: ProgressColumns) -> None:
        requests = self.queues.requests
        slots = self.queues.slots(progress.handles)
        requests["computed"][slots] = progress.computed_tokens
        requests["output"][slots] = progress.output_tokens
        requests["target"][slots] = requests["prompt"][slots] + progress.output_tokens
        requests["in_flight"][slots] = progress.in_flight_tokens if len(progress.in_flight_tokens) else 0
        running = slots[requests["state"][slots] == RUNNING]
        requests["blocks"][running] = blocks_of_tokens(requests["computed"][running], self._block_tokens)

    def _add(self, rows: Table, columns: RequestColumns) -> None:
        self.class_names.extend(columns.class_names)
        self.tenant_names.extend(columns.tenant_names)
        if len(rows):
            self._last_handle = max(self._last_handle, self.queues.add(rows))
