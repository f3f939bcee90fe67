"""S3 when the network and the server misbehave: a real server behind a proxy that spoils chosen replies."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.faulty_proxy import Proxy, Spoiler
from support.lag import Lag
from support.ministack import foreign_client

from phalanx.objects import (
    ObjectExists,
    ObjectMissing,
    ObjectStore,
    StorageSettings,
    StoreDenied,
    StoreError,
    fsspec_options,
    open_store,
)
from phalanx.objects.retry import SLOWEST_BYTES_PER_S, Deadline, DeadlineError, TransientError
from phalanx.objects.s3 import S3Store
from phalanx.objects.s3_client import resolve
from phalanx.objects.s3_parts import PartsUploader

DATA = os.urandom(3_000_000)
LARGE = DATA[:1_000_000]
ALLOWED_S = len(LARGE) / SLOWEST_BYTES_PER_S
SHORT_S = 2.0  # a deadline that is to be missed by what stalls, and kept by what does not on a busy machine
LATE_S = 0.5  # beyond a deadline, what the machine's own lag took left out
Open = Callable[..., ObjectStore]


def first(method: str, spoiler: Spoiler, count: int = 1) -> Callable[[str, str, int], Spoiler | None]:
    """Spoils the first `count` requests of a method."""
    return lambda seen_method, path, number: spoiler if seen_method == method and number < count else None


def ranges_asked(proxy: Proxy) -> list[tuple[int, int]]:
    found = [re.fullmatch(r"bytes=(\d+)-(\d*)", ranged) for method, _, ranged in proxy.seen if method == "GET"]
    return [(int(match[1]), int(match[2] or -1)) for match in found if match]


def test_read_cut_reply_is_continued_where_it_stopped(open_place: Open, proxy: Proxy) -> None:
    """Case 14."""
    store = open_place(proxy.endpoint)
    store.create("k", DATA)
    proxy.choose = first("GET", Spoiler(cut_body=1_000_000), count=2)
    assert store.read("k", 500_000, 2_400_000) == DATA[500_000:2_900_000]
    starts = [start for start, _ in ranges_asked(proxy)]
    assert len(starts) == 3
    assert starts[0] == 500_000 < starts[1] <= 1_500_000 < starts[2] <= 2_500_000


def test_read_shorter_range_than_asked_is_never_passed_on(open_place: Open, proxy: Proxy) -> None:
    """Case 14."""
    store = open_place(proxy.endpoint)
    store.create("k", DATA)
    proxy.choose = first("GET", Spoiler(shorten=1_000_000), count=2)
    assert store.read("k", 500_000, 2_400_000) == DATA[500_000:2_900_000]


def test_read_whole_object_cut_is_continued(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    store.create("k", DATA)
    proxy.choose = first("GET", Spoiler(cut_body=1_000_000))
    assert store.read("k") == DATA


def test_read_object_replaced_between_tries_gives_one_version_whole(
    open_place: Open, proxy: Proxy, ministack: str
) -> None:
    store, direct = open_place(proxy.endpoint), open_place(ministack)
    direct.create("k", DATA)
    other = DATA[::-1]

    def replace_then_cut(method: str, path: str, number: int) -> Spoiler | None:
        if method != "GET" or number > 1:
            return None
        if number == 1:
            direct.delete("k")
            direct.create("k", other)
        return Spoiler(cut_body=1_000_000)

    proxy.choose = replace_then_cut
    assert store.read("k", 500_000, 2_400_000) == other[500_000:2_900_000]


def test_read_given_up_names_url_range_place_tries_and_cause(open_place: Open, proxy: Proxy, place: str) -> None:
    store = open_place(proxy.endpoint, deadline_s=SHORT_S)
    store.create("k", DATA)
    proxy.choose = lambda method, path, number: (
        (Spoiler(cut_body=1_000_000) if number == 0 else Spoiler(refuse=503)) if method == "GET" else None
    )
    with pytest.raises(StoreError) as caught:
        store.read("k", 500_000, 2_400_000)
    told = str(caught.value)
    found = re.search(r"bytes 500000 to 2900000, stopped at (\d+): still failing after (\d+) tries", told)
    assert f"{place}/k: " in told and found, told
    assert 500_000 < int(found[1]) <= 1_500_000 and int(found[2]) >= 2
    assert "503" in told


def test_read_server_that_answers_other_bytes_is_an_error(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint, deadline_s=0.5)
    store.create("k", b"x" * 200)
    proxy.choose = first("GET", Spoiler(other_start=7), count=99)
    with pytest.raises(StoreError):
        store.read("k", 100, 50)


def test_every_call_retries_a_server_that_is_busy(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    statuses = [500, 503, 429, 408]
    proxy.choose = lambda method, path, number: (
        Spoiler(refuse=statuses[(len(proxy.seen) // 2) % 4]) if number % 2 == 0 else None
    )
    store.create("k", b"data")
    assert store.read("k") == b"data"
    assert store.info("k").num_bytes == 4
    assert [info.key for info in store.list()] == list(store.children()) == ["k"]
    store.delete("k")
    assert len(proxy.seen) == 2 * 7, "each of six calls twice, and create's look whether its first try had worked"


def seconds_until_given_up(call: Callable[[], object]) -> float:
    """How long a call took that must end at its deadline, without the time in which a busy machine held it up."""
    start_s = time.monotonic()
    with Lag() as lag, pytest.raises(StoreError, match="deadline"):
        call()
    return time.monotonic() - start_s - lag.total_s


def test_stalled_server_is_an_error_at_the_deadline(open_place: Open, proxy: Proxy) -> None:
    """Case 6."""
    store = open_place(proxy.endpoint, deadline_s=SHORT_S)
    proxy.choose = lambda method, path, number: Spoiler(stall=True)
    calls: list[Callable[[], object]] = [
        lambda: store.read("k"),
        lambda: store.read("k", 5),
        lambda: store.create("k", b""),
        lambda: store.info("k"),
        lambda: list(store.list()),
        lambda: list(store.children()),
        lambda: store.delete("k"),
    ]
    with ThreadPoolExecutor(len(calls)) as threads:
        assert max(threads.map(seconds_until_given_up, calls)) < SHORT_S + LATE_S


def test_one_stalled_reply_is_retried_within_the_deadline(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint, deadline_s=6.0)
    proxy.choose = first("PUT", Spoiler(stall=True))
    store.create("k", b"data")
    assert store.read("k") == b"data"


def test_create_lost_reply_recognises_its_own_object(open_place: Open, proxy: Proxy) -> None:
    """Checkpoint case 10."""
    store = open_place(proxy.endpoint)
    proxy.choose = first("PUT", Spoiler(lose_reply=True))
    store.create("k", DATA)
    assert store.read("k") == DATA


def test_create_lost_reply_empty_object_recognises_its_own(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    proxy.choose = first("PUT", Spoiler(lose_reply=True))
    store.create("k", b"")
    assert store.read("k") == b""


@pytest.mark.parametrize("there", [b"other", b"longer"], ids=["same size", "other size"])
def test_create_failed_try_then_taken_by_another_is_exists(
    open_place: Open, ministack: str, proxy: Proxy, there: bytes
) -> None:
    store, other = open_place(proxy.endpoint), open_place(ministack)

    def choose(method: str, path: str, number: int) -> Spoiler | None:
        if method == "PUT" and number == 0:
            other.create("k", there)
            return Spoiler(refuse=500)
        return None

    proxy.choose = choose
    with pytest.raises(ObjectExists):
        store.create("k", b"mine!")
    assert store.read("k") == there


def test_create_same_bytes_without_a_lost_reply_is_exists(open_place: Open, proxy: Proxy) -> None:
    """Checkpoint case 10: equal bytes alone are no echo of one's own write."""
    store = open_place(proxy.endpoint)
    store.create("k", b"same")
    with pytest.raises(ObjectExists):
        store.create("k", b"same")


def test_create_conflict_409_is_retried_while_the_key_is_free(open_place: Open, proxy: Proxy) -> None:
    """Checkpoint case 10."""
    store = open_place(proxy.endpoint)
    proxy.choose = first("PUT", Spoiler(refuse=409), count=3)
    store.create("k", b"data")
    assert store.read("k") == b"data"
    assert sum(method == "PUT" for method, _, _ in proxy.seen) == 4


def test_refused_access_names_the_object_and_is_not_retried(open_place: Open, proxy: Proxy) -> None:
    store = open_place(proxy.endpoint)
    proxy.choose = lambda method, path, number: Spoiler(refuse=403)
    for call in (lambda: store.read("a/k"), lambda: store.create("a/k", b"")):
        with pytest.raises(StoreDenied, match=r"a/k.*credentials"):
            call()
    assert len(proxy.seen) == 2


def test_list_meets_a_key_that_cannot_be_named_tells_it_at_once(open_place: Open, ministack: str, place: str) -> None:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    foreign_client(ministack).put_object(Bucket=bucket, Key=f"{prefix}/x//y.txt", Body=b"")
    started_s = time.monotonic()
    with pytest.raises(StoreError, match=r"x//y\.txt"):
        list(open_place(ministack, deadline_s=30).list())
    assert time.monotonic() - started_s < 10


def test_missing_bucket_names_the_remedy(ministack: str) -> None:
    store = open_store("s3://no-such-bucket-here", StorageSettings(endpoint=ministack), deadline_s=5)
    for call in (lambda: store.create("k", b""), lambda: list(store.list()), lambda: store.read("k")):
        with pytest.raises(StoreDenied, match="create the bucket"):
            call()


def test_unreachable_server_is_an_error_at_the_deadline(open_place: Open) -> None:
    store = open_place("http://127.0.0.1:9", deadline_s=0.3)
    with pytest.raises(StoreError, match="deadline"):
        store.info("k")


# Uploads in parts


@pytest.fixture
def small_parts(place: str) -> Open:
    """Opens this test's place with parts from 500 KB on, of 100 KB (the test server takes small parts)."""
    bucket, _, prefix = place.removeprefix("s3://").partition("/")

    def opened(endpoint: str, deadline_s: float = 10) -> ObjectStore:
        settings = StorageSettings(endpoint=endpoint)
        store = S3Store(bucket, settings, deadline_s, parts_above_bytes=500_000, part_bytes=100_000)
        return store.within(prefix)

    return opened


def part_puts(proxy: Proxy) -> int:
    return sum("partNumber" in path for _, path, _ in proxy.seen)


def test_large_object_goes_up_in_parts_and_is_create_only(small_parts: Open, proxy: Proxy) -> None:
    """Checkpoint case 9."""
    store = small_parts(proxy.endpoint)
    with store.writer("big/k") as writer:
        writer.write(LARGE)
        writer.commit()
    assert part_puts(proxy) == 10 + 1  # and one of the trial
    assert store.read("big/k") == LARGE
    with pytest.raises(ObjectExists):
        store.create("big/k", LARGE[::-1])
    assert store.read("big/k") == LARGE
    assert [info.key for info in store.list()] == ["big/k"]


def test_parts_lost_reply_to_the_last_call_recognises_its_own(small_parts: Open, proxy: Proxy) -> None:
    """Checkpoint case 10."""
    store = small_parts(proxy.endpoint)
    store.create("warm", LARGE)
    lost = threading.Event()

    def choose(method: str, path: str, number: int) -> Spoiler | None:
        if method == "POST" and "uploadId" in path and not lost.is_set():
            lost.set()
            return Spoiler(lose_reply=True)
        return None

    proxy.choose = choose
    store.create("k", LARGE)
    assert lost.is_set()
    assert store.read("k") == LARGE


def test_parts_failed_upload_leaves_neither_object_nor_parts(
    small_parts: Open, proxy: Proxy, ministack: str, place: str
) -> None:
    """Checkpoint case 8."""
    store = small_parts(proxy.endpoint)
    store.create("warm", LARGE)
    proxy.choose = lambda method, path, number: Spoiler(refuse=403) if "partNumber=3" in path else None
    with pytest.raises(StoreDenied):
        store.create("k", LARGE)
    with pytest.raises(ObjectMissing):
        store.info("k")
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    uploads = foreign_client(ministack).list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    assert [upload["Key"] for upload in uploads if prefix in upload["Key"]] == []


def test_parts_server_without_the_condition_gets_one_put(small_parts: Open, proxy: Proxy) -> None:
    """Checkpoint case 9, 11."""
    store = small_parts(proxy.endpoint)
    proxy.choose = lambda method, path, number: (
        Spoiler(drop_header="if-none-match") if method == "POST" and "uploadId" in path else None
    )
    assert store.creates_large_objects_in_parts() is False
    tried = part_puts(proxy)
    store.create("k", LARGE)
    assert part_puts(proxy) == tried + 1  # the store's own trial
    assert store.read("k") == LARGE
    with pytest.raises(ObjectExists):
        store.create("k", LARGE[::-1])


# One deadline for the whole call, wherever in it the server falls silent


def silent_at(cases: dict[str, str]) -> Callable[[str, str, int], Spoiler | None]:
    """Below each folder, never answers the requests whose "METHOD path" begins as its pattern says."""

    def choose(method: str, path: str, number: int) -> Spoiler | None:
        for folder, pattern in cases.items():
            if f"/{folder}/" in path and re.match(pattern, f"{method} {path}"):
                return Spoiler(stall=True)
        return None

    return choose


def seconds_by_case(cases: Iterable[str], call: Callable[[str], object]) -> dict[str, float]:
    """How long `call` of each case took that must end at its deadline, all at once."""
    with ThreadPoolExecutor(8) as threads:
        times_s = {case: threads.submit(seconds_until_given_up, partial(call, case)) for case in cases}
        return {case: time_s.result() for case, time_s in times_s.items()}


def test_create_server_stalls_while_we_look_for_our_object_ends_at_the_deadline(open_place: Open, proxy: Proxy) -> None:
    deadline_s = 3 * LATE_S  # half of it goes into the first try, so a look with a deadline of its own would be late
    cases = {"its-size": "HEAD", "its-bytes": "GET"}
    silent = silent_at(cases)
    store = open_place(proxy.endpoint, deadline_s=deadline_s)
    proxy.choose = lambda method, path, number: (
        Spoiler(hold_reply=True) if method == "PUT" else silent(method, path, number)
    )
    times_s = seconds_by_case(cases, lambda case: store.create(f"{case}/k", b"data"))
    assert max(times_s.values()) < deadline_s + LATE_S, times_s
    assert {method for method, _, _ in proxy.seen} == {"PUT", "HEAD", "GET"}


def warm(store: S3Store) -> None:
    """Its first upload in parts, before which it tries what the server can do; a busy machine may need several."""
    for number in range(10):
        with suppress(DeadlineError):
            store.create(f"warm-{number}", LARGE)
            return
    pytest.fail("no upload was done within its deadline")


def test_commit_in_parts_server_stalls_anywhere_ends_at_the_deadline(small_parts: Open, proxy: Proxy) -> None:
    cases = {
        "beginning": r"POST .*uploads",
        "one-part": r"PUT .*partNumber=3",
        "all-parts": r"PUT .*partNumber",
        "completing": r"POST .*uploadId",
    }
    store = small_parts(proxy.endpoint, deadline_s=SHORT_S)
    warm(store)
    proxy.choose = silent_at(cases)

    def commit(case: str) -> None:
        with store.writer(f"{case}/k") as writer:
            writer.write(LARGE)
            writer.commit()

    times_s = seconds_by_case(cases, commit)
    assert max(times_s.values()) < SHORT_S + ALLOWED_S + LATE_S, times_s


def test_parts_that_trickle_past_their_deadline_do_not_hold_up_the_next_upload(
    place: str, ministack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    access = resolve(bucket, StorageSettings(endpoint=ministack))
    uploader = PartsUploader(access, 30, part_bytes=100_000)
    real, freed = uploader._request, threading.Event()

    def request(operation: str, key: str, **arguments: Any) -> Any:
        if operation == "upload_part" and key.endswith("held"):
            freed.wait(60)
        return real(operation, key, **arguments)

    monkeypatch.setattr(uploader, "_request", request)
    try:
        with pytest.raises(TransientError, match="deadline"):
            uploader.put(f"{prefix}/held", memoryview(LARGE), Deadline(SHORT_S))
        uploader.put(f"{prefix}/next", memoryview(LARGE), Deadline(30))
    finally:
        freed.set()


def test_first_commit_in_parts_server_stalls_in_the_trial_ends_at_the_deadline(small_parts: Open, proxy: Proxy) -> None:
    cases = {"first": r"PUT", "second": r"POST", "part": r"PUT .*partNumber"}
    stores = {case: small_parts(proxy.endpoint, deadline_s=SHORT_S) for case in cases}
    proxy.choose = silent_at(cases)
    times_s = seconds_by_case(cases, lambda case: stores[case].create(f"{case}/k", LARGE))
    assert max(times_s.values()) < SHORT_S + ALLOWED_S + LATE_S, times_s
    proxy.restart(proxy.mark)
    stores["part"].create("part/k", LARGE)
    assert part_puts(proxy) == 10 + 1, "a trial that ran out of time was taken for a refusal"


def test_first_commit_in_parts_trial_object_stays_creates_all_the_same(small_parts: Open, proxy: Proxy) -> None:
    store = small_parts(proxy.endpoint)
    proxy.choose = lambda method, path, number: (
        Spoiler(stall=True) if method == "DELETE" and "uploadId" not in path else None
    )
    store.create("k", LARGE)
    assert store.read("k") == LARGE
    assert [info.key for info in store.list()] == list(store.children()) == ["k"]


# The local file that a streamed object is collected in


def test_writer_on_a_full_local_disk_is_a_store_error_and_creates_nothing(
    open_place: Open, ministack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_place(ministack)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b"))  # noqa: SIM115, PTH123
    for chunk in (b"small: fails when it is flushed", LARGE):
        with pytest.raises(StoreError, match="No space left on device") as raised, store.writer("k") as writer:
            writer.write(chunk)
            writer.commit()
        assert isinstance(raised.value.__cause__, OSError)
    assert list(store.list()) == []


def test_writer_without_a_local_folder_is_a_store_error(
    open_place: Open, ministack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StoreError, match="gone"):
        open_place(ministack).writer("k")


# Settings, credentials, other clients


def test_fsspec_opens_the_same_objects(place: str, ministack: str) -> None:
    settings = StorageSettings(endpoint=ministack)
    open_store(place, settings).create("a/k", b"data")
    options = fsspec_options(place, settings)
    assert not {"key", "secret", "token"} & set(options)
    with fsspec.open(f"{place}/a/k", "rb", **options) as file:
        assert file.read() == b"data"


def test_profile_gives_credentials_endpoint_and_region_to_both_clients(
    place: str, ministack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile lab]\naws_access_key_id = a\naws_secret_access_key = b\n"
        f"region = us-east-1\nendpoint_url = {ministack}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    settings = StorageSettings(profile="lab")
    open_store(place, settings).create("k", b"data")
    options = fsspec_options(place, settings)
    assert (options["endpoint_url"], options["client_kwargs"]["region_name"]) == (ministack, "us-east-1")
    with fsspec.open(f"{place}/k", "rb", **options) as file:
        assert file.read() == b"data"


def test_settings_win_over_variables(place: str, ministack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    open_store(place, StorageSettings(endpoint=ministack), deadline_s=5).create("k", b"")


def test_variables_alone_name_the_endpoint(place: str, ministack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack)
    open_store(place, deadline_s=5).create("k", b"")


def credentials_file(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = y\naws_session_token = {key}\n")


@pytest.fixture
def rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of credentials that a test may rewrite, and no others."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    credentials_file(file, "old")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    return file


def test_expired_credentials_are_taken_anew_by_every_call(
    small_parts: Open, open_place: Open, proxy: Proxy, rewritten: Path
) -> None:
    stores = [open_place(proxy.endpoint), small_parts(proxy.endpoint)]
    stores[0].create("k", DATA)
    answered: list[str] = []

    def expired(method: str, path: str, number: int, headers: Mapping[str, str]) -> Spoiler | None:
        is_old = "Credential=old/" in headers.get("authorization", "")
        answered.append("old" if is_old else "new")
        return Spoiler(refuse=400, code="ExpiredToken") if is_old else None

    proxy.choose_by_headers = expired
    credentials_file(rewritten, "new")
    assert stores[0].read("k", 10, 1000) == DATA[10:1010]
    stores[1].create("parts", LARGE)
    assert stores[0].read("k") == DATA
    assert answered.count("old") <= 4 and answered[-1] == "new"


def test_expired_credentials_that_nobody_renews_are_an_error_that_says_so(
    open_place: Open, proxy: Proxy, rewritten: Path
) -> None:
    store = open_place(proxy.endpoint, deadline_s=SHORT_S)
    proxy.choose = lambda method, path, number: Spoiler(refuse=400, code="ExpiredToken")
    with pytest.raises(StoreError, match="the credentials have expired"):
        store.read("k")
    assert len(proxy.seen) > 1


def test_refused_credentials_are_tried_again_once_when_the_chain_has_others(
    open_place: Open, proxy: Proxy, rewritten: Path
) -> None:
    store = open_place(proxy.endpoint)
    store.create("k", b"data")
    proxy.choose = first("GET", Spoiler(refuse=403, code="InvalidAccessKeyId"))
    credentials_file(rewritten, "new")
    assert store.read("k") == b"data"
    proxy.choose = lambda method, path, number: Spoiler(refuse=403, code="AccessDenied")
    before = len(proxy.seen)
    with pytest.raises(StoreDenied, match="check the credentials"):
        store.read("k")
    assert len(proxy.seen) == before + 1, "a refusal of fresh credentials is final"


def test_no_credentials_is_refused_at_opening(ministack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreDenied, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket", StorageSettings(endpoint=ministack))


def test_wrong_region_names_the_remedy(place: str, ministack: str) -> None:
    store = open_store(place, StorageSettings(endpoint=ministack, region="eu-west-1"), deadline_s=5)
    with pytest.raises(StoreDenied, match="set region"):
        store.create("k", b"")


@pytest.mark.parametrize("settings", [StorageSettings(profile="none"), StorageSettings(endpoint="nonsense")])
def test_wrong_settings_are_refused_at_opening(ministack: str, settings: StorageSettings) -> None:
    with pytest.raises(StoreDenied):
        open_store("s3://bucket", settings)


def test_missing_client_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    with pytest.raises(StoreDenied, match=r"phalanx\[s3\]"):
        open_store("s3://bucket")


def test_store_used_in_a_forked_child_is_refused_not_hung(open_place: Open, ministack: str) -> None:
    """Case 13."""
    store = open_place(ministack)
    store.create("k", b"")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store.read("k")
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert b"forked" in os.read(reader, 1000)
    os.close(reader)


def test_unfinished_uploads_are_listed_dropped_once_and_leave_objects_alone(ministack, s3_prefix):
    bucket, _, prefix = s3_prefix.removeprefix("s3://").partition("/")
    client, store = foreign_client(ministack), open_store(s3_prefix)
    store.create("a/whole", b"whole")
    for key in ("a/whole", "a/half", "b/other"):
        client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")
    found = store.uploads("a/")
    assert sorted(upload.key for upload in found) == ["a/half", "a/whole"]
    for upload in (*found, *found):
        store.drop_upload(upload)
    assert [upload.key for upload in store.uploads()] == ["b/other"]
    assert store.read("a/whole") == b"whole"
    assert open_store("memory://").uploads() == ()
