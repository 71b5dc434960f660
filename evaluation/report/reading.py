"""Reads a folder of results: `goodput.json`, the runs behind it, and timelines where there are some."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

SCHEMA = 1
SUMMARY, PARQUET, LINES, TIMELINES = "goodput.json", "points.parquet", "points*.jsonl", "timelines.json"

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0)]
Quantiles = Annotated[tuple[float, ...], Field(max_length=101)]


class ReportError(RuntimeError):
    """Results that cannot be shown; names the file, what is wrong with it and the remedy."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class OneCap(_Value):
    """Goodput (requests/s) with the cap that does best over all workloads."""

    cap: int
    goodput: float


class Cell(_Value):
    """The goodput of one policy, with its best cap, on one workload and profile; all in requests/s."""

    profile: str
    workload: str
    policy: str
    cap: int | None = None
    goodput: float
    low: float | None = None
    high: float | None = None
    one_cap: OneCap | None = None
    paper: float | None = None
    bound: float | None = None
    highest_looked_at: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Profile and workload."""
        return self.profile, self.workload


class Difference(_Value):
    """The ratio of two policies' goodputs on one workload, and its 95 % interval."""

    profile: str
    workload: str
    policy: str
    against: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Summary(_Value):
    """`goodput.json`."""

    schema_: Literal[1] = Field(alias="schema")
    kind: Literal["goodput"]
    commit: str
    version: str
    profiles: dict[str, str]
    seeds: tuple[int, ...]
    requests: Annotated[int, Field(gt=0)]
    violation_limit: Share
    caps: tuple[int, ...] = ()
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...] = ()


class Run(_Value):
    """One run; of one that was ended early (not ``complete``) only a lower bound of its violations is known.

    Attributes:
        violations: share of requests that missed a deadline.
        ttft_quantiles: seconds at 0, 1, .. 100 %; empty where nothing is known.
        tbt_quantiles: the same of the gaps between tokens.
        decision_p50, decision_p99: seconds.
        decision_share: time of all decisions over that of all iterations.
    """

    profile: str
    workload: str
    policy: str
    base_policy: str
    cap: int | None = None
    rate: Rate
    seed: int
    requests: int
    complete: bool
    violations: Share | None = None
    ttft_quantiles: Quantiles = ()
    tbt_quantiles: Quantiles = ()
    decision_p50: float | None = None
    decision_p99: float | None = None
    decision_share: float | None = None


class Timeline(_Value):
    """A window of one run; rows of (start s, duration s, prefill tokens, decode tokens, deadlines missed)."""

    profile: str
    workload: str
    policy: str
    rate: Rate
    seed: int
    limit_seconds: float
    iterations: tuple[tuple[float, float, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a report shows; ``runs`` are those of the summary's length, in a fixed order."""

    summary: Summary
    runs: tuple[Run, ...]
    timelines: tuple[Timeline, ...]


def read_results(folder: Path) -> Results:
    """Reads a folder that `slidingserve goodput` or `reproduce` wrote. O(size of its files).

    Raises:
        ReportError: no such folder, no results in it, or damaged ones.
        ImportError: the runs are there as Parquet only, and pyarrow is not installed (extra ``evaluation``).
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise ReportError(f"{folder}: {what}; give the --out of `slidingserve goodput` or `slidingserve reproduce`")
    file = folder / SUMMARY
    if not file.is_file():
        unfinished = any(folder.glob(LINES))
        raise ReportError(
            f"{folder} has no {SUMMARY}: "
            + (
                "its sweep has not ended; repeat the command that began it, which goes on where it was interrupted"
                if unfinished
                else "it holds no results; give the --out of `slidingserve goodput` or `slidingserve reproduce`"
            )
        )
    summary = _summary(file)
    runs = [run for run in _runs(folder) if run.requests == summary.requests]
    timelines = _timelines(folder / TIMELINES)
    return Results(summary, tuple(sorted(runs, key=_order)), timelines)


def _order(run: Run) -> tuple[object, ...]:
    return run.profile, run.workload, run.policy, run.rate, run.seed


def _summary(file: Path) -> Summary:
    document = _json(file)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ReportError(
            f"{file}: has schema {found!r}, this release reads {SCHEMA}; "
            "make the report with the release that made the results, or repeat them"
        )
    return _checked(Summary, document, file)


def _timelines(file: Path) -> tuple[Timeline, ...]:
    if not file.exists():
        return ()
    return tuple(_checked_list(Timeline, _json(file), file))


def _runs(folder: Path) -> list[Run]:
    """Returns the runs: of the Parquet file if there is one and it can be read here, else of the lines."""
    parquet, lines = folder / PARQUET, sorted(folder.glob(LINES))
    if parquet.exists():
        try:
            return _checked_list(Run, [_run_values(row) for row in _parquet(parquet)], parquet)
        except ImportError:
            if not lines:
                raise
    runs: dict[tuple[object, ...], Run] = {}
    for file in lines:
        for run in _checked_list(Run, [_run_values(_plain(row)) for row in _lines(file)], file):
            key = (*_order(run), run.requests)
            if key not in runs or not runs[key].complete:
                runs[key] = run
    return list(runs.values())


def _parquet(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ReportError(f"{file}: is damaged ({_first_line(error)}); {_remedy(file)}") from error
    return rows


def _lines(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines; one that was cut off (its process was killed) is passed over."""
    rows, texts = [], _text(file).splitlines()
    for text in texts:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    if texts and not rows:
        raise ReportError(f"{file}: is damaged (no line of it is a run); {_remedy(file)}")
    return rows


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of the lines with names as in the Parquet file."""
    inner = {
        f"{name}_{key}": value
        for name in ("violations", "decision_seconds")
        for key, value in (row.get(name) or {}).items()
    }
    return {**row, **inner}


def _run_values(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a `Run`; the misses of one that was ended early are a lower bound of its violations."""
    share = row.get("violations_deadline")
    if share is None and row.get("missed") is not None and row.get("requests"):
        share = row["missed"] / row["requests"]
    kept = {name: value for name, value in row.items() if value is not None}
    p50, p99 = row.get("decision_seconds_p50"), row.get("decision_seconds_p99")
    return {**kept, "violations": share, "decision_p50": p50, "decision_p99": p99}


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file))
    except ValueError as error:
        raise ReportError(f"{file}: is damaged ({error}); {_remedy(file)}") from error


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{file}: cannot be read ({error.strerror}); give a folder that you may read") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{file}: is damaged (not text); {_remedy(file)}") from error


Model = TypeVar("Model", bound=_Value)


def _checked(model: type[Model], document: Any, file: Path) -> Model:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ReportError(f"{file}: {_first_fault(error)}; {_remedy(file)}") from error


def _checked_list(model: type[Model], rows: Any, file: Path) -> list[Model]:
    try:
        return TypeAdapter(list[model]).validate_python(rows)  # type: ignore[valid-type]
    except ValidationError as error:
        raise ReportError(f"{file}: {_first_fault(error)}; {_remedy(file)}") from error


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where or 'the document'}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _remedy(file: Path) -> str:
    if file.name == TIMELINES:
        return "remove the file to do without timelines, or repeat the command that wrote it"
    return "repeat the command that wrote it; runs that are kept are not made again"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
