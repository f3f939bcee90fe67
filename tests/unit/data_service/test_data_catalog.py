"""The catalog: what may be registered, once and for all, and a database that is only a copy of storage."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from corpus_builders import DyingStore, Killed
from support.datasets import document_lengths, write_dataset, write_split

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.datasets import LARGEST_PAGE, Filter, decode, page_size, place_of
from phalanx.data.registration import Catalog
from phalanx.data.store import CatalogStore
from phalanx.lineage import DamagedObject
from phalanx.objects import open_store
from phalanx.rpc import AlreadyExists, NotFound
from phalanx.stream.manifest import open_split


class Place:
    """A cluster root and a database on disk, and a few datasets beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = open_store(f"file://{folder}/store")
        self.num_databases = 0

    def open(self, registry=None, database: str | None = None) -> Catalog:
        """A catalog as a service opens it."""
        catalog = Catalog(registry or self.registry, self.database(database))
        catalog.rebuild()
        return catalog

    def database(self, name: str | None = None) -> CatalogStore:
        self.num_databases += 1
        return CatalogStore(f"sqlite:///{self.folder}/{name or self.num_databases}.sqlite", self.registry.url)

    def dataset(self, name: str, **options) -> str:
        return write_dataset(f"file://{self.folder}/{name}", **options)

    def objects(self) -> dict[str, bytes]:
        """Everything in the registry."""
        return {info.key: self.registry.read(info.key) for info in self.registry.list("registry/")}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def everything(catalog: Catalog):
    """All that the catalog can tell."""
    page = catalog.page(0, "")
    return {newest.dataset: catalog.versions(newest.dataset) for newest in page.versions}


def test_register_tells_what_the_manifests_say(place):
    url = place.dataset("web")
    version = place.open().register("r1", "web", url + "/", "ada")
    train, held_out = open_split(open_store(f"{url}/train")), open_split(open_store(f"{url}/held_out"))
    assert (version.dataset, version.version, version.owner, version.request_id) == ("web", 1, "ada", "r1")
    assert (version.url, version.tokenizer_digest, version.vocab_size) == (url, train.tokenizer_digest, 300)
    for found, split, name in zip(version.splits, (train, held_out), ("train", "held_out"), strict=True):
        assert (found.name, found.url, found.digest) == (name, f"{url}/{name}", split.digest)
        assert (found.num_documents, found.num_tokens, found.num_shards) == (
            split.num_documents,
            split.num_tokens,
            split.num_shards,
        )
        assert found.num_bytes == int(split.columns.num_bytes.sum())


def test_register_creates_one_object_of_the_bytes_that_it_answers_with(place):
    version = place.open().register("r1", "web", place.dataset("web"), "ada")
    assert place.objects() == {"registry/datasets/web/00000001.json": version.encode()}
    assert decode(version.key, version.encode()) == version


def test_register_without_held_out_split_is_fine(place):
    version = place.open().register("r1", "web", place.dataset("web", held_out=False), "ada")
    assert [split.name for split in version.splits] == ["train"]


def test_register_again_with_the_same_request_gives_the_same_version_though_the_data_is_gone(place):
    catalog, url = place.open(), place.dataset("web")
    first = catalog.register("r1", "web", url, "ada")
    (place.folder / "web" / "train" / "manifest.json").unlink()
    assert catalog.register("r1", "web", url, "bob") == first
    assert len(place.objects()) == 1


@pytest.mark.parametrize("name", ["t-00000003.tar", "t-00000000.index.safetensors", "t-00000005.ids.json"])
def test_register_of_data_without_one_of_its_objects_names_it_and_registers_nothing(place, name):
    catalog, url = place.open(), place.dataset("web")
    (place.folder / "web" / "train" / name).unlink()
    with pytest.raises(PhalanxError, match=rf"web/train/{name} \(missing\).*bring them back"):
        catalog.register("r1", "web", url, "ada")
    assert place.objects() == {}


def test_register_of_data_with_a_cut_shard_tells_both_sizes(place):
    catalog, url = place.open(), place.dataset("web")
    path = place.folder / "web" / "train" / "t-00000002.tar"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PhalanxError, match=r"t-00000002.tar \(1,000 bytes instead of .*1 are not as it says"):
        catalog.register("r1", "web", url, "ada")


def test_register_of_the_same_data_gives_the_version_that_is_there(place):
    catalog, url = place.open(), place.dataset("web")
    first = catalog.register("r1", "web", url, "ada")
    assert catalog.register("r2", "web", url, "bob") == first
    other = catalog.register("r3", "other", url, "bob")
    assert (other.dataset, other.version) == ("other", 1)
    assert len(place.objects()) == 2


def test_register_of_new_data_is_the_next_version(place):
    catalog = place.open()
    versions = [catalog.register(f"r{n}", "web", place.dataset(f"web{n}", seed=n), "ada") for n in (1, 2, 3)]
    assert [version.version for version in versions] == [1, 2, 3]
    assert catalog.versions("web") == tuple(versions)
    assert catalog.page(0, "").versions == (versions[2],)


@pytest.mark.parametrize(("dataset", "folder"), [("other", "web"), ("web", "else")])
def test_request_id_that_was_used_for_something_else_is_refused(place, dataset, folder):
    catalog = place.open()
    place.dataset("else", seed=2)
    catalog.register("r1", "web", place.dataset("web"), "ada")
    with pytest.raises(AlreadyExists, match=r"request_id is 'r1': expected a fresh one: it registered web version 1"):
        catalog.register("r1", dataset, f"file://{place.folder}/{folder}", "ada")
    assert len(place.objects()) == 1


@pytest.mark.parametrize("name", ["", "Web", "a/b", "../x", ".x", "a b", "ü", "x" * 129, "a\nb"])
def test_name_that_is_none_is_refused(place, name):
    with pytest.raises(PhalanxError, match=r"^dataset is .*: expected a name of lower case letters"):
        place.open().register("r1", name, "file:///nowhere", "ada")


@pytest.mark.parametrize("request_id", ["", "x" * 201, "a\nb", "\x00"])
def test_request_id_that_is_none_is_refused(place, request_id):
    with pytest.raises(PhalanxError, match=r"^request_id"):
        place.open().register(request_id, "web", "file:///nowhere", "ada")


@pytest.mark.parametrize("url", ["file://./data", "file://~/data", "file://../data"])
def test_relative_url_is_refused(place, url):
    with pytest.raises(PhalanxError, match="the service runs elsewhere"):
        place.open().register("r1", "web", url, "ada")


@pytest.mark.parametrize("url", ["/data", "http://x/y", "s3://", ""])
def test_url_of_no_store_is_refused(place, url):
    with pytest.raises(PhalanxError, match="storage URL"):
        place.open().register("r1", "web", url, "ada")


def test_folder_without_a_training_split_is_refused(place):
    url = place.dataset("web")
    for wrong in (f"{url}/train", f"file://{place.folder}", f"{url}/held_out"):
        with pytest.raises(PhalanxError, match=r"expected a dataset: a folder that holds train/manifest\.json"):
            place.open().register("r1", "web", wrong, "ada")


def test_splits_of_the_wrong_kind_are_refused(place):
    url = f"file://{place.folder}/web"
    root = open_store(url)
    root.create("tokenizer.json", b'{"a": "tokenizer"}')
    write_split(root.within("train"), [[5, 6]], is_held_out=True)
    with pytest.raises(PhalanxError, match="expected a split to train on"):
        place.open().register("r1", "web", url, "ada")


@pytest.mark.parametrize(("options"), [{"tokenizer": b"another"}, {"vocab_size": 400}])
def test_splits_with_two_tokenizers_are_refused(place, options):
    url = f"file://{place.folder}/web"
    root = open_store(url)
    root.create("tokenizer.json", b'{"a": "tokenizer"}')
    write_split(root.within("train"), document_lengths())
    write_split(root.within("held_out"), [[5, 6]], is_held_out=True, **options)
    with pytest.raises(PhalanxError, match=r"held_out is 'sha256:.*expected the tokenizer of .*train"):
        place.open().register("r1", "web", url, "ada")


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("{}")])
def test_tokenizer_that_is_missing_or_another_is_refused(place, damage):
    url = place.dataset("web")
    damage(place.folder / "web" / "tokenizer.json")
    with pytest.raises(PhalanxError, match=r"expected the tokenizer with which it was prepared \(tokenizer\.json"):
        place.open().register("r1", "web", url, "ada")


def test_manifest_that_is_broken_is_refused(place):
    url = place.dataset("web")
    (place.folder / "web" / "train" / "manifest.json").write_text("{}")
    with pytest.raises(PhalanxError, match=r"expected a manifest of format phalanx\.split/1"):
        place.open().register("r1", "web", url, "ada")
    assert place.objects() == {}


def test_unknown_dataset_is_not_found(place):
    with pytest.raises(NotFound, match="dataset is 'nothing'"):
        place.open().versions("nothing")


@pytest.mark.parametrize("size", [-1, LARGEST_PAGE + 1])
def test_page_of_an_impossible_size_is_refused(size):
    with pytest.raises(PhalanxError, match=f"page_size is {size}"):
        page_size(size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_pages_show_every_dataset_once_by_name(place, size):
    catalog, url = place.open(), place.dataset("web")
    names = ["b", "a", "a-b", "a.c", "z9", "c_d", "00"]
    for name in names:
        catalog.register(f"r-{name}", name, url, "ada")
    shown, token = [], ""
    while True:
        page = catalog.page(size, token)
        assert len(page.versions) <= size
        shown += [version.dataset for version in page.versions]
        token = page.next_token
        if not token:
            break
    assert shown == sorted(names)


def test_page_token_of_ones_own_making_is_refused(place):
    with pytest.raises(PhalanxError, match="dataset is"):
        place.open().page(0, "NOT A TOKEN")


def test_database_that_was_lost_is_rebuilt_from_storage(place):
    catalog = place.open()
    for n in range(4):
        catalog.register(f"r{n}", f"web{n % 2}", place.dataset(f"data{n}", seed=n), "ada")
    before = everything(catalog)
    assert everything(place.open()) == before
    assert [len(versions) for versions in before.values()] == [2, 2]


def test_database_that_is_behind_or_ahead_of_storage_follows_it(place):
    catalog = place.open(database="one")
    catalog.register("r1", "web", place.dataset("data1", seed=1), "ada")
    place.open().register("r2", "web", place.dataset("data2", seed=2), "bob")
    assert [version.owner for version in place.open(database="one").versions("web")] == ["ada", "bob"]
    for info in list(place.registry.list("registry/")):
        place.registry.delete(info.key)
    assert everything(place.open(database="one")) == {}


def test_database_of_another_registry_is_emptied(place):
    place.open(database="one").register("r1", "web", place.dataset("web"), "ada")
    elsewhere = open_store(f"file://{place.folder}/elsewhere")
    catalog = Catalog(elsewhere, CatalogStore(f"sqlite:///{place.folder}/one.sqlite", elsewhere.url))
    assert everything(catalog) == {}


def test_object_in_the_registry_that_is_damaged_is_left_out_and_its_number_stays_taken(place, caplog):
    place.registry.create("registry/datasets/web/00000001.json", b"{}")
    catalog = place.open()
    assert "left out of the catalog" in caplog.text
    assert catalog.register("r1", "web", place.dataset("web"), "ada").version == 2


def test_two_services_that_register_at_once_lose_nothing(place):
    catalogs = [place.open() for _ in range(4)]
    urls = [place.dataset(f"data{n}", seed=n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda n: catalogs[n % 4].register(f"r{n % 8}", "web", urls[n % 8], "ada"), range(24)))
    assert sorted({version.version for version in versions}) == list(range(1, 9))
    assert len({version.request_id for version in versions}) == 8
    assert everything(place.open())["web"] == tuple(sorted(set(versions), key=lambda version: version.version))


def test_service_killed_after_the_object_was_created_answers_the_next_time(place):
    """The object is there, the database does not know it, the client never heard of it."""
    dying = DyingStore(open_store(f"file://{place.folder}"), "store", [1])
    url = place.dataset("web")
    with pytest.raises(Killed):
        place.open(dying, "one").register("r1", "web", url, "ada")
    assert len(place.objects()) == 1
    again = place.open(database="one")
    assert again.register("r1", "web", url, "ada").version == 1
    assert len(place.objects()) == 1


def test_catalog_answers_while_another_registers(place):
    """Slow storage of one dataset holds up nobody who only looks."""
    catalog, url = place.open(), place.dataset("web")
    catalog.register("r0", "other", url, "ada")
    entered, go_on = threading.Event(), threading.Event()
    slow = catalog._splits

    def splits(root):
        entered.set()
        assert go_on.wait(30)
        return slow(root)

    catalog._splits = splits
    with ThreadPoolExecutor(1) as pool:
        registered = pool.submit(catalog.register, "r1", "web", url, "ada")
        assert entered.wait(30)
        assert catalog.versions("other")[0].version == 1
        go_on.set()
        assert registered.result(30).version == 1


@pytest.mark.parametrize("change", [{"format": 2}, {"more": 1}, {"version": 2}, {"dataset": "x"}, {"splits": []}])
def test_decode_of_another_object_names_the_key(place, change):
    version = place.open().register("r1", "web", place.dataset("web"), "ada")
    data = json.dumps({**json.loads(version.encode()), **change}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(DamagedObject, match=r"registry/datasets/web/00000001\.json"):
        decode(version.key, data)


@pytest.mark.parametrize(
    "key", ["registry/datasets/web/1.json", "registry/datasets/00000001.json", "registry/datasets/W/00000001.json", "x"]
)
def test_key_of_no_version_is_none(key):
    assert place_of(key) is None


@pytest.mark.parametrize("url", ["nonsense", "mysterysql://x/y", ""])
def test_database_url_of_no_database_is_told(url):
    with pytest.raises(PhalanxError, match=r"database\.url: expected sqlite"):
        CatalogStore(url, "file:///x")


def test_database_in_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(OutsideError, match=r"database sqlite:.* failed: .*unable to open"):
        CatalogStore(f"sqlite:///{tmp_path}/none/x.sqlite", "file:///x")


def test_database_row_that_was_damaged_is_told(place):
    catalog = place.open(database="one")
    catalog.register("r1", "web", place.dataset("web"), "ada")
    engine = sa.create_engine(f"sqlite:///{place.folder}/one.sqlite")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE dataset_versions SET body = '{}'"))
    engine.dispose()
    with pytest.raises(OutsideError, match="delete it, it is rebuilt from storage"):
        catalog.versions("web")


def test_services_that_open_one_database_at_once_both_get_it(place):
    with ThreadPoolExecutor(6) as pool:
        for database in pool.map(lambda _: place.database("one"), range(6)):
            assert tuple(database.listed(("", 0), Filter(), 10)) == ()


def test_catalog_on_s3_is_created_once_and_rebuilt(s3_prefix, tmp_path):
    """Create-only objects and listings of a real S3 server."""
    registry, url = open_store(f"{s3_prefix}/root"), write_dataset(f"{s3_prefix}/web")

    def opened(name):
        catalog = Catalog(registry, CatalogStore(f"sqlite:///{tmp_path}/{name}", registry.url))
        catalog.rebuild()
        return catalog

    catalogs = [opened(f"{number}.sqlite") for number in range(3)]
    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(lambda n: catalogs[n % 3].register(f"r{n % 2}", "web", url, "ada"), range(6)))
    assert len(found) == 1 and [info.key for info in registry.list("registry/")] == [
        "registry/datasets/web/00000001.json"
    ]
    assert everything(opened("fresh.sqlite")) == everything(catalogs[0])
