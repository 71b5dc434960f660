"""Traces: every published format by example, every refusal by its words, and workloads made of them."""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evaluation.traces import TraceError, TraceRows, read_trace, spread_stamps, trace_workload
from evaluation.workloads import WorkloadError

OURS = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

EXAMPLES = {
    "ours": OURS + "0.0,374,44\n4.314579,396,109\n4.541877,879,55\n",
    "ours, other columns and order": "client,output_tokens,prompt_tokens,arrival_s\na,44,374,10\nb,109,396,14.314579\n"
    "a,55,879,14.541877\n",
    "azure 2023": AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51.2224670,879,55\n",
    "azure 2024": AZURE + "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 00:00:04.324509+00:00,396,109\n"
    "2024-05-10 00:00:04.551807+00:00,879,55\n",
    "burstgpt": BURSTGPT + "5,ChatGPT,374,44,418,Conversation log\n9.314579,GPT-4,396,109,505,API log\n"
    "9.541877,ChatGPT,879,55,934,Conversation log\n",
    "mooncake": '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1, 2]}\n'
    '{"timestamp": 5314.579, "input_length": 396, "output_length": 109, "hash_ids": []}\n'
    '{"timestamp": 5541.877, "input_length": 879, "output_length": 55}\n',
}


def write(folder: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(folder: Path, content: str | bytes) -> str:
    """Returns the words with which a file is refused, without the folder."""
    path = write(folder, content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.replace(f"{folder}/", "")


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("variant", ["plain", "gzip", "byte order mark", "windows line ends", "blank lines"])
def test_all_formats_read_alike_whatever_the_files_name(tmp_path: Path, example: str, variant: str) -> None:
    content = EXAMPLES[example].encode()
    changed = {
        "plain": content,
        "gzip": gzip.compress(content),
        "byte order mark": b"\xef\xbb\xbf" + content,
        "windows line ends": content.replace(b"\n", b"\r\n"),
        "blank lines": b"\n" + content.replace(b"\n", b"\n\n"),
    }[variant]
    rows = read_trace(write(tmp_path, changed, "trace.dat"))
    np.testing.assert_allclose(rows.arrival_seconds, [0.0, 4.314579, 4.541877], atol=1e-9)
    assert rows.prompt_tokens.tolist() == [374, 396, 879]
    assert rows.output_tokens.tolist() == [44, 109, 55]
    assert (len(rows), rows.skipped) == (3, 0)
    assert rows.prompt_tokens.dtype == rows.output_tokens.dtype == np.int64


def test_azure_stamps_keep_all_seven_digits_across_midnight_and_zones(tmp_path: Path) -> None:
    rows = read_trace(
        write(
            tmp_path,
            AZURE + "2023-11-16 23:59:59.9999999,1,1\n2023-11-17 00:00:00.0000001,1,1\n"
            "2023-11-17T02:00:00.0000003+02:00,1,1\n2023-11-17 00:00:01,1,1\n",
        )
    )
    assert rows.arrival_seconds.tolist() == [0.0, 2e-7, 4e-7, 1.0000001]


def test_failed_requests_without_a_response_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = read_trace(
        write(
            tmp_path,
            BURSTGPT + "5,ChatGPT,472,0,472,API log\n7,ChatGPT,0,0,0,API log\n8,ChatGPT,10,20,30,API log\n"
            "9.5,GPT-4,30,0,30,API log\n10,GPT-4,30,5,35,API log\n",
        )
    )
    assert rows.arrival_seconds.tolist() == [0.0, 2.0]
    assert rows.prompt_tokens.tolist() == [10, 30]
    assert rows.skipped == 3


def test_whole_numbers_may_be_written_as_decimals_and_quoted(tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, OURS + '"0", 374.0 ,"44"\n'))
    assert (rows.prompt_tokens.tolist(), rows.output_tokens.tolist()) == ([374], [44])


def test_a_limit_ends_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path, OURS + "0,1,1\n1,2,0\n2,3,3\nbroken,,\n")
    assert read_trace(path, limit=2).prompt_tokens.tolist() == [1, 3]
    with pytest.raises(TraceError):
        read_trace(path, limit=3)
    with pytest.raises(WorkloadError, match="0 requests are out of range; choose from 1"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,-5,9", "trace.csv, line 3, column prompt_tokens: '-5' is negative; correct the value or remove the row"),
        ("1,5,-9", "trace.csv, line 3, column output_tokens: '-9' is negative; correct"),
        ("-1,5,9", "trace.csv, line 3, column arrival_s: '-1' is negative; correct"),
        ("nan,5,9", "trace.csv, line 3, column arrival_s: 'nan' is not a finite number; correct"),
        ("inf,5,9", "trace.csv, line 3, column arrival_s: 'inf' is not a finite number; correct"),
        ("1,NaN,9", "trace.csv, line 3, column prompt_tokens: 'NaN' is not a finite number; correct"),
        ("1,many,9", "trace.csv, line 3, column prompt_tokens: 'many' is not a number; correct"),
        ("1,5,", "trace.csv, line 3, column output_tokens: '' is not a number; correct"),
        ("1,5.5,9", "trace.csv, line 3, column prompt_tokens: '5.5' is not a whole number of tokens; correct"),
        ("1,99999999,9", "column prompt_tokens: '99999999' is more than 10000000 tokens; correct"),
        ("1,0,9", "trace.csv, line 3, column prompt_tokens: '0' is an empty prompt; use 1 or more tokens, or remove"),
        ("1,5", "trace.csv, line 3, column output_tokens: is missing, the row has 2 of 3 cells; complete the row"),
        (
            "0.5,5,9\n0.25,5,9",
            "line 4, column arrival_s: '0.25' is earlier than the arrival in line 3; sort the rows by arrival",
        ),
    ],
)
def test_a_bad_value_is_refused_with_file_line_column_value_and_remedy(tmp_path: Path, line: str, words: str) -> None:
    assert words in refusal(tmp_path, f"{OURS}0,1,1\n{line}\n9,1,1\n")


def test_errors_say_where_they_are_as_attributes_too(tmp_path: Path) -> None:
    path = write(tmp_path, OURS + "0,1,1\n1,-5,9\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.column) == (path, 3, "prompt_tokens")


def test_a_bad_time_of_azure_is_refused(tmp_path: Path) -> None:
    for stamp in ("yesterday", "12.5", "2023-13-45 00:00:00", "2023-11-16 18:15:46.12345678901", ""):
        words = f"trace.csv, line 2, column TIMESTAMP: '{stamp}' is not a date and time; correct"
        assert words in refusal(tmp_path, f"{AZURE}{stamp},1,1\n")


def test_a_missing_column_names_those_found_and_the_known_formats(tmp_path: Path) -> None:
    message = refusal(tmp_path, "arrival_s,prompt_tokens,reply\n0,1,1\n")
    assert message.startswith(
        "trace.csv, line 1: no column 'output_tokens' in the header, only 'arrival_s', 'prompt_tokens', 'reply'; "
        "the known formats are ours: arrival_s, prompt_tokens, output_tokens; Azure: TIMESTAMP, ContextTokens"
    )
    assert "BurstGPT: Timestamp, Request tokens, Response tokens" in message
    assert "Mooncake (JSON lines): timestamp, input_length, output_length" in message
    assert "no column 'ContextTokens' in the header" in refusal(tmp_path, "TIMESTAMP,GeneratedTokens\n0,1\n")


def test_a_table_without_a_header_is_refused(tmp_path: Path) -> None:
    assert "no column 'arrival_s', 'prompt_tokens', 'output_tokens' in the header, only '0.0', '374', '44'" in refusal(
        tmp_path, "0.0,374,44\n1.0,374,44\n"
    )


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"")])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "trace.csv: is empty; the known formats are ours: arrival_s" in refusal(tmp_path, content)


def test_a_header_alone_is_refused(tmp_path: Path) -> None:
    assert "trace.csv: holds a header but no request; use a trace with at least one" in refusal(tmp_path, OURS)


def test_a_trace_in_which_nothing_was_generated_is_refused(tmp_path: Path) -> None:
    assert "trace.csv: all 2 requests have 0 output tokens; use a trace" in refusal(tmp_path, OURS + "0,5,0\n1,5,0\n")


@pytest.mark.parametrize(
    "content",
    [
        bytes(range(256)),
        b"\x89PNG\r\n\x1a\n\xff\xfe",
        OURS.encode() + b"0,1,1\n\xff\xfe,1,1\n",
        gzip.compress(b"\x00\x01\x02"),
        OURS.encode("utf-16"),
    ],
    ids=["all bytes", "picture", "in the middle", "zipped", "utf-16"],
)
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "trace.csv: is a binary file, not UTF-8 text; the known formats are" in refusal(tmp_path, content)


def test_a_truncated_or_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = "".join(f"{i},{rng.integers(1, 9999)},{rng.integers(1, 9999)}\n" for i in range(5000))
    zipped = gzip.compress((OURS + rows).encode())
    words = "trace.csv: is a damaged or truncated gzip file"
    for content in (zipped[: len(zipped) // 2], zipped[:5], zipped[:-8] + b"\0" * 8):
        message = refusal(tmp_path, content)
        assert words in message
        assert message.endswith("; fetch it again")
    flipped = bytearray(zipped)
    flipped[len(zipped) // 2] ^= 0xFF
    assert words in refusal(tmp_path, bytes(flipped)) or "line" in refusal(tmp_path, bytes(flipped))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}/none.csv: no such file; check the path")):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match=re.escape(f"{tmp_path}: is a folder; name a file in it")):
        read_trace(str(tmp_path))


def test_a_huge_cell_is_refused_and_shown_in_short(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"{OURS}0,{'9' * 5000},1\n")
    assert "is not a finite number" in message
    assert len(message) < 250
    assert "is not a table of comma-separated values (field larger" in refusal(tmp_path, f"{OURS}0,{'9' * 200_000},1\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 1, "input_length": 5}', "line 2: no field 'output_length', only 'timestamp', 'input_length'"),
        ('{"timestamp": 1, "input_length"', "line 2: is not JSON ("),
        ("[1, 2, 3]", "line 2: is not a JSON object; put one object on each line"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "column timestamp: 'nan' is not a finite number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 5}', "column input_length: 'True' is not a number"),
        ('{"timestamp": 1, "input_length": null, "output_length": 5}', "column input_length: 'None' is not a number"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 5}', "'1.5' is not a whole number of tokens"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5}', "column input_length: '0' is an empty prompt"),
        ('{"timestamp": 1, "input_length": 5, "output_length": -5}', "column output_length: '-5' is negative"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 5}',
            "line 2, column timestamp: '0' is earlier than the",
        ),
        ("[" * 100_000, "line 2: is not JSON ("),
    ],
)
def test_bad_json_lines_are_refused(tmp_path: Path, line: str, words: str) -> None:
    good = json.dumps({"timestamp": 1, "input_length": 5, "output_length": 5})
    assert words in refusal(tmp_path, f"{good}\n{line}\n")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=60).map(lambda text: (OURS + text).encode())))
def test_any_bytes_are_read_or_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, content)
    try:
        rows = read_trace(path)
    except TraceError:
        return
    assert len(rows) >= 1
    assert rows.arrival_seconds[0] == 0.0
    assert rows.prompt_tokens.min() >= 1


def trace(arrivals: list[float], prompts: list[int] | None = None) -> TraceRows:
    lengths = np.array(prompts if prompts is not None else [100] * len(arrivals), np.int64)
    return TraceRows(np.array(arrivals, np.float64), lengths, np.full(len(arrivals), 7, np.int64))


def test_a_workload_keeps_the_recorded_times_and_gives_absolute_slos() -> None:
    workload = trace_workload(trace([0.0, 1.0, 3.0, 6.0], [1, 2499, 2500, 9000]), name="mine")
    assert workload.arrival_seconds.tolist() == [0.0, 1.0, 3.0, 6.0]
    assert workload.ttft_slo_seconds.tolist() == [1.0, 1.0, 4.0, 4.0]
    assert workload.tbt_slo_seconds.tolist() == [0.05] * 4
    assert workload.ttlt_slo_seconds.tolist() == [0.0] * 4
    assert (workload.class_names, workload.class_index.tolist()) == (("mine",), [1, 1, 1, 1])
    assert workload.rate == 0.5  # three gaps in 6 s


def test_the_rate_scales_the_times_of_the_first_requests() -> None:
    workload = trace_workload(trace([0.0, 1.0, 3.0, 100.0]), name="mine", requests=3, rate=2.0)
    np.testing.assert_allclose(workload.arrival_seconds, [0.0, 1 / 3, 1.0])
    assert workload.rate == 2.0


def test_given_slos_replace_the_absolute_ones() -> None:
    workload = trace_workload(trace([0.0, 1.0], [1, 9000]), name="mine", ttft_seconds=0.7, tbt_seconds=0.02)
    assert workload.ttft_slo_seconds.tolist() == [0.7, 0.7]
    assert workload.tbt_slo_seconds.tolist() == [0.02, 0.02]


def test_fewer_rows_than_wanted_are_all_used() -> None:
    assert len(trace_workload(trace([0.0, 1.0]), name="mine", requests=50)) == 2
    single = trace_workload(trace([0.0]), name="mine", rate=3.0)
    assert (single.arrival_seconds.tolist(), single.rate) == ([0.0], 3.0)


def test_quantised_stamps_are_spread_inside_their_bucket_and_keep_their_order() -> None:
    stamps = np.repeat(np.arange(50) * 3.0, 8)
    spread = spread_stamps(stamps, seed=4)
    assert (np.diff(spread) > 0).all()
    assert ((spread >= stamps) & (spread < stamps + 3.0)).all()
    assert np.mean(spread - stamps) == pytest.approx(1.5, abs=0.2)
    np.testing.assert_array_equal(spread, spread_stamps(stamps, seed=4))
    assert not np.array_equal(spread, spread_stamps(stamps, seed=5))


def test_a_bucket_ends_at_the_next_stamp_and_is_never_wider_than_the_usual_one() -> None:
    stamps = np.repeat(np.array([0.0, 3.0, 6.0, 9.0, 10.0, 13.0, 16.0, 100.0, 103.0, 106.0, 109.0]), 5)
    inside = (spread_stamps(stamps, seed=0) - stamps).reshape(11, 5)
    assert inside[3].max() < 1.0  # 9 to 10
    assert inside[6].max() < 3.0  # 16 to 100
    assert (inside >= 0).all()


def test_single_equal_stamps_and_bursts_stay_as_recorded() -> None:
    mostly_distinct = np.sort(np.append(np.arange(100.0), [5.0, 7.0, 7.0]))
    bursts = np.repeat(np.array([0.0, 10.0, 20.0]), 30)
    for stamps in (mostly_distinct, bursts):
        np.testing.assert_array_equal(spread_stamps(stamps, seed=0), stamps)


@given(
    gaps=st.lists(st.floats(0, 1000), min_size=1, max_size=80),
    rate=st.one_of(st.none(), st.floats(0.01, 100)),
    requests=st.one_of(st.none(), st.integers(1, 100)),
    seed=st.integers(0, 2**32),
)
def test_workloads_of_traces_ascend_from_zero_with_the_wanted_rate(
    gaps: list[float], rate: float | None, requests: int | None, seed: int
) -> None:
    rows = trace(np.concatenate([[0.0], np.cumsum(gaps)]).tolist())
    try:
        workload = trace_workload(rows, name="mine", requests=requests, rate=rate, seed=seed)
    except WorkloadError as error:
        assert "arrive at once" in str(error)  # noqa: PT017  # only some examples are refused
        return
    arrival = workload.arrival_seconds
    assert arrival[0] == 0.0
    assert (np.diff(arrival) >= 0).all()
    assert len(workload) == min(len(rows), requests or len(rows))
    if rate is not None and len(workload) > 1:
        assert (len(workload) - 1) / arrival[-1] == pytest.approx(rate)


def test_bad_wishes_for_a_trace_are_refused() -> None:
    rows = trace([0.0, 1.0])
    with pytest.raises(WorkloadError, match="rate 0 requests/s is out of range; choose one above 0"):
        trace_workload(rows, name="mine", rate=0.0)
    with pytest.raises(WorkloadError, match="rate nan requests/s is out of range"):
        trace_workload(rows, name="mine", rate=math.nan)
    with pytest.raises(WorkloadError, match="0 requests are out of range; choose from 1"):
        trace_workload(rows, name="mine", requests=0)
    with pytest.raises(WorkloadError, match="TBT SLO -1 s is out of range"):
        trace_workload(rows, name="mine", tbt_seconds=-1.0)
    with pytest.raises(WorkloadError, match="seed -3 is negative"):
        trace_workload(rows, name="mine", seed=-3)
    with pytest.raises(WorkloadError, match="rate 2: all 2 requests of mine arrive at once; leave the rate out"):
        trace_workload(trace([0.0, 0.0]), name="mine", rate=2.0)


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "count", "last_seconds", "quantised"),
    [
        ("azure_llm_2023/conv.csv", 19366, 3501.721937, False),
        ("azure_llm_2023/code.csv", 8819, 3435.948056, False),
        ("mooncake/conversation.csv", 12031, 3536.999, True),
        ("servegen/composed_1h_m-small.csv", 14576, 3599.7425, False),
    ],
)
def test_published_traces_read_and_make_workloads(
    data_folder: Path, file: str, count: int, last_seconds: float, quantised: bool
) -> None:
    rows = read_trace(data_folder / file)
    assert (len(rows), rows.skipped) == (count, 0)
    assert rows.arrival_seconds[-1] == pytest.approx(last_seconds)
    with (data_folder / file).open() as text:
        table = list(csv.DictReader(text))
    assert rows.prompt_tokens.sum() == sum(int(row["prompt_tokens"]) for row in table)
    assert rows.output_tokens.sum() == sum(int(row["output_tokens"]) for row in table)

    workload = trace_workload(rows, name=file, requests=2000, rate=3.0)
    assert len(workload) == 2000
    assert 1999 / workload.arrival_seconds[-1] == pytest.approx(3.0)
    assert (np.diff(workload.arrival_seconds) >= 0).all()
    recorded = trace_workload(rows, name=file)
    assert np.array_equal(recorded.arrival_seconds, rows.arrival_seconds) is not quantised
    if quantised:
        assert np.mean(np.diff(recorded.arrival_seconds) == 0) < 0.001
        assert np.abs(recorded.arrival_seconds - rows.arrival_seconds).max() <= 3.1
