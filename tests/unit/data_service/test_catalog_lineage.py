"""The catalog: what was made from what, and lists by name, digest, owner and origin."""

from __future__ import annotations

import pytest
from support.datasets import write_dataset

from phalanx.core.errors import PhalanxError
from phalanx.data.datasets import Filter, reference_of
from phalanx.data.registration import Catalog
from phalanx.data.store import CatalogStore
from phalanx.data.wire import version_message, version_of
from phalanx.objects import open_store
from phalanx.rpc import NotFound


@pytest.fixture
def registry(tmp_path):
    return open_store(f"file://{tmp_path}/store")


def open_catalog(registry, tmp_path, name="data"):
    catalog = Catalog(registry, CatalogStore(f"sqlite:///{tmp_path}/{name}.sqlite", registry.url))
    catalog.rebuild()
    return catalog


@pytest.fixture
def family(registry, tmp_path):
    """raw 1 and 2; clean 1 made from raw 2; mix 1 from clean 1 and raw 1."""
    catalog = open_catalog(registry, tmp_path)

    def add(name, seed, made_from=(), owner="ada"):
        url = write_dataset(f"file://{tmp_path}/{name}-{seed}", seed=seed)
        return catalog.register(f"r-{name}-{seed}", name, url, owner, made_from)

    versions = {
        "raw1": add("raw", 1),
        "raw2": add("raw", 2, owner="bob"),
        "clean1": add("clean", 3, ["raw@2"]),
        "mix1": add("mix", 4, ["clean@1", "raw@1", "raw@1"]),
    }
    return catalog, versions


def names(page):
    return [f"{version.dataset}@{version.version}" for version in page.versions]


def listed(catalog, size=0, **wanted):
    """All pages of a list."""
    found, token = [], ""
    while True:
        page = catalog.page(size, token, Filter(**wanted))
        found += names(page)
        token = page.next_token
        if not token:
            return found


def test_version_tells_what_it_was_made_from(family):
    _, versions = family
    assert [(each.dataset, each.version) for each in versions["mix1"].parents] == [("clean", 1), ("raw", 1)]
    assert versions["mix1"].parents[0].digest == versions["clean1"].digest
    assert versions["raw1"].parents == () and versions["raw1"].recipe_digest.startswith("sha256:")


def test_version_goes_over_the_wire_and_back(family):
    _, versions = family
    for version in versions.values():
        assert version_of(version_message(version)) == version
        assert version_message(version).digest == version.digest


@pytest.mark.parametrize("size", [1, 2, 100])
def test_list_with_filters_shows_all_versions_that_pass_once(family, size):
    catalog, versions = family
    assert listed(catalog, size) == ["clean@1", "mix@1", "raw@2"]
    assert listed(catalog, size, name_prefix="r") == ["raw@2"]
    assert listed(catalog, size, owner="ada") == ["clean@1", "mix@1", "raw@1"]
    assert listed(catalog, size, made_from="raw") == ["clean@1", "mix@1"]
    assert listed(catalog, size, made_from="raw@2") == ["clean@1"]
    assert listed(catalog, size, digest=versions["raw1"].digest) == ["raw@1"]
    assert listed(catalog, size, digest=versions["raw1"].splits[0].digest) == ["raw@1"]
    assert listed(catalog, size, digest=versions["raw1"].tokenizer_digest) == ["clean@1", "mix@1", "raw@1", "raw@2"]
    assert listed(catalog, size, digest="sha256:0", name_prefix="raw") == []
    assert listed(catalog, size, name_prefix="_") == [] and listed(catalog, size, name_prefix="%") == []


def test_lineage_survives_the_loss_of_the_database(family, registry, tmp_path):
    catalog, versions = family
    again = open_catalog(registry, tmp_path, "another")
    assert again.versions("mix") == (versions["mix1"],)
    assert listed(again, made_from="raw") == listed(catalog, made_from="raw")


def test_version_to_be_made_from_that_is_not_there_is_refused_and_nothing_is_registered(family, registry, tmp_path):
    catalog, _ = family
    url = write_dataset(f"file://{tmp_path}/new", seed=9)
    before = [info.key for info in registry.list("registry/")]
    for reference in ("raw@3", "nothing@1", "raw"):
        with pytest.raises(NotFound, match="made_from"):
            catalog.register("r-new", "new", url, "ada", [reference])
    assert [info.key for info in registry.list("registry/")] == before


@pytest.mark.parametrize("text", ["", "Raw@1", "raw@", "raw@0", "raw@x", "raw@-1", "raw@1@2", "raw@999999999"])
def test_reference_that_is_none_is_refused(text):
    with pytest.raises(PhalanxError):
        reference_of(text)


def test_filter_that_cannot_be_is_refused(family):
    with pytest.raises(PhalanxError, match="NAME@VERSION"):
        family[0].page(0, "", Filter(made_from="raw@x"))
