"""A process group's key-value store on the scheduler's clock."""

from __future__ import annotations

from tests.ranks.scheduler import Scheduler


class Store:
    """As a process group's key-value store: each request takes a while to arrive, and its answer too."""

    def __init__(self, scheduler: Scheduler, prefix: str = "", values: dict[str, bytes] | None = None) -> None:
        self.prefix = prefix
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {} if values is None else values

    def under(self, prefix: str) -> Store:
        return Store(self._scheduler, f"{self.prefix}{prefix}/", self._values)

    def set(self, key: str, value: str) -> None:
        self._scheduler.step()
        self._values[self.prefix + key] = value.encode()
        self._scheduler.step()

    def add(self, key: str, amount: int) -> int:
        self._scheduler.step()
        total = int(self._values.get(self.prefix + key, b"0")) + amount
        self._values[self.prefix + key] = str(total).encode()
        self._scheduler.step()
        return total

    def check(self, keys: list[str]) -> bool:
        self._scheduler.step()
        are_there = all(self.prefix + key in self._values for key in keys)
        self._scheduler.step()
        return are_there

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = []
        for key in keys:  # not all of them at one moment: a store of files does not do that
            self._scheduler.step()
            values.append(self._values[self.prefix + key])
        self._scheduler.step()
        return values

    def has_extended_api(self) -> bool:
        return True
