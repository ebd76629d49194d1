"""The catalog of a simulated disk, which loses power together with the devices on the disk."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from tests.devices.simulated_disk import SimulatedDisk
from tiered.errors import DeviceError, UsageError
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root, RootHeader

__all__ = ["SimulatedCatalog", "changed_catalog"]

_NAME = "catalog"


class SimulatedCatalog(SqliteCatalog):
    """A catalog in memory whose database the disk has as a value: a commit is one transaction of the disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        """Open the catalog of the disk; UsageError where there is none."""
        self._disk = disk
        image = disk.load(_NAME)
        if not isinstance(image, bytes):
            raise UsageError("the disk holds no catalog: create one")
        super().__init__(None)
        self._replace(image)

    @classmethod
    def create(cls, disk: SimulatedDisk, root: Root) -> SimulatedCatalog:  # type: ignore[override]
        """Put the catalog of an empty store on the disk, and open it."""
        if disk.load(_NAME) is not None:
            raise UsageError("the disk holds a catalog already: open it")
        with closing(SqliteCatalog.create(None, root)) as catalog, catalog._using("create") as connection:
            disk.transact(_NAME, connection.serialize())
        return cls(disk)

    def _replace(self, image: bytes) -> None:
        with self._using("open") as connection:
            connection.deserialize(image)

    def _transact(self, verb: str, write: Callable[[sqlite3.Connection, RootHeader], None]) -> None:
        before = self._disk.load(_NAME)
        super()._transact(verb, write)
        try:
            with self._using(verb) as connection:
                self._disk.transact(_NAME, connection.serialize())
        except DeviceError as error:
            assert isinstance(before, bytes)
            self._replace(before)
            self._failed = f"an earlier commit failed ({error}) and its outcome is unknown"
            raise


@contextmanager
def changed_catalog(disk: SimulatedDisk) -> Iterator[sqlite3.Connection]:
    """Give the database of the disk's catalog, and put it back with what was changed."""
    image = disk.load(_NAME)
    assert isinstance(image, bytes)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(image)
        yield connection
        connection.commit()
        disk.transact(_NAME, connection.serialize())
