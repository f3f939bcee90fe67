"""The corpus and the fork server that these tests share."""

from support.job_fixtures import corpus, server

__all__ = ["corpus", "server"]
