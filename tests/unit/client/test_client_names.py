"""What a user writes, as the services know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.client import absolute_url, job_name
from phalanx.core.errors import PhalanxError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("demo", "projects/default/jobs/demo"),
        ("team/demo", "projects/team/jobs/demo"),
        ("projects/team/jobs/demo", "projects/team/jobs/demo"),
    ],
)
def test_job_name_in_any_form_is_the_whole_one(written, meant):
    assert job_name(written) == meant


@pytest.mark.parametrize("written", ["", "a/b/c", "projects/a/b", "a b", "projects//jobs/x"])
def test_job_name_that_is_none_is_refused(written):
    with pytest.raises(PhalanxError, match="PROJECT/NAME"):
        job_name(written)


@pytest.mark.parametrize("written", ["job.toml", "jobs/job.toml"])
def test_job_file_is_no_name_of_a_submitted_job(written):
    with pytest.raises(PhalanxError, match=r"expected the name of a submitted job, not its file; name it as"):
        job_name(written)


def test_url_of_a_relative_folder_starts_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")

    assert absolute_url("file://./a/b") == f"file://{tmp_path}/a/b"
    assert absolute_url("file://../a") == f"file://{Path(tmp_path).parent}/a"
    assert absolute_url("file://~/a") == "file:///home/ada/a"


@pytest.mark.parametrize("url", ["file:///a/b", "s3://bucket/a", "file://localhost/a", "file://a", "memory://"])
def test_url_of_another_form_stays_for_the_service_to_judge(url):
    assert absolute_url(url) == url
