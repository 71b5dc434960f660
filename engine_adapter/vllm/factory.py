"""Makes the scheduler that ``--scheduler-cls engine_adapter.vllm.build_scheduler`` names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from engine_adapter.client import ClientSettings, SchedulerClient
from engine_adapter.source import DecisionSource
from engine_adapter.vllm import hooks
from engine_adapter.vllm.advisor import Advisor
from engine_adapter.vllm.ledger import Ledger
from engine_adapter.vllm.reports import Reporter
from engine_adapter.vllm.scheduler import AdvisedScheduler, Staff
from engine_adapter.vllm.settings import AdapterSettings, SettingsError, load_settings
from engine_adapter.vllm.slos import TermsReader
from engine_adapter.vllm.timing import IterationTimes
from engine_adapter.vllm.view import SchedulerView
from engine_adapter.vllm.watchdog import Watchdog
from slidingserve.contract.values import Mode, OpenSession, SloDefaults

_log = logging.getLogger("vllm.slidingserve")

SourceFactory = Callable[[AdapterSettings, OpenSession], DecisionSource]
"""Makes who decides, and opens the session without waiting for it."""


def connect(settings: AdapterSettings, opening: OpenSession) -> DecisionSource:
    """Returns a client of the sidecar, which connects in the background."""
    client = SchedulerClient(ClientSettings(settings.target))
    client.start(opening)
    return client


def build_scheduler(
    *, vllm_config: Any, connect: SourceFactory = connect, clock: Callable[[], float] = time.monotonic, **kwargs: Any
) -> Any:
    """Returns vLLM's scheduler, advised by a sidecar; vLLM's own, and one line in the log why, where that cannot be.

    Takes vLLM's arguments as vLLM gives them, by name. The base is ``AsyncScheduler`` or ``Scheduler``, as vLLM itself
    would choose: the wrong one would waste every second call.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    base = AsyncScheduler if is_async else Scheduler
    settings = _settings(vllm_config)
    if settings is None:
        return base(vllm_config=vllm_config, **kwargs)

    def make_staff(scheduler: Any) -> Staff:
        return staff_for(scheduler, settings, is_async=is_async, connect=connect, clock=clock)

    advised = type(f"Advised{base.__name__}", (AdvisedScheduler, base), {})
    return advised(vllm_config=vllm_config, make_staff=make_staff, **kwargs)


def staff_for(
    scheduler: Any,
    settings: AdapterSettings,
    *,
    is_async: bool,
    connect: SourceFactory = connect,
    clock: Callable[[], float] = time.monotonic,
) -> Staff:
    """Returns who works for a scheduler; the session is opened in the background."""
    view = SchedulerView(scheduler, is_async=is_async)
    terms = TermsReader(settings, _log.warning)
    ledger = Ledger(view, terms, clock)
    opening = OpenSession(
        view.limits(),
        engine=view.engine_info(settings.instance),
        slo_defaults=SloDefaults(settings.ttft_slo_seconds, settings.tbt_slo_seconds, settings.ttlt_slo_seconds),
        policy=settings.policy,
        policy_parameters=settings.policy_parameters,
        profile=settings.profile,
        mode=Mode[settings.mode.upper()],
    )
    source = connect(settings, opening)
    _log.info(
        "slidingserve: %s at %s, scheduling is %s", settings.mode, settings.target, "async" if is_async else "sync"
    )
    watchdog = Watchdog(settings.starvation_seconds, settings.waiting_starvation_seconds)
    times = IterationTimes(settings.warmup_iterations)
    advisor = Advisor(view, ledger, times, watchdog, source, settings, clock)
    reporter = Reporter(
        advisor, source, terms.counters, settings.target, settings.report_seconds, _log.info, _log.warning
    )
    return Staff(advisor, ledger, reporter)


def _settings(vllm_config: Any) -> AdapterSettings | None:
    """Returns the adapter's settings; None, after one line in the log, if vLLM is to be left alone."""
    try:
        settings = load_settings(vllm_config.additional_config, os.environ)
        reasons = hooks.missing_hooks() or hooks.unsupported_settings(vllm_config)
    except SettingsError as error:
        reasons = [str(error)]
    except Exception as error:
        reasons = [f"{error!r}"]
    if not reasons:
        import vllm

        if not hooks.is_tested(vllm.__version__):
            _log.warning("slidingserve: not tested with vLLM %s, all hooks are there; going on", vllm.__version__)
        _show_client_log()
        return settings
    _log.error(
        "slidingserve: vLLM serves with its own policy: %s (see `slidingserve doctor --vllm`)", "; ".join(reasons)
    )
    return None


def _show_client_log() -> None:
    """Lets the client's lines appear where vLLM's do."""
    ours, theirs = logging.getLogger("engine_adapter"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(logging.INFO)
        ours.propagate = not theirs.handlers
