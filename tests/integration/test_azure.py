"""``az://`` through adlfs, on Azurite, Azure's own emulator: what the table of fsspec's backends says of it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import pytest
import torch
from tests.integration.servers.packages import from_servers_environment

import cloudckpt
from cloudckpt.doctor import examine
from cloudckpt.stores import Store, open_store
from cloudckpt.testing import StoreContract
from cloudckpt.testing.contract_base import ODD_KEYS, content, keys, put
from cloudckpt.testing.servers import Program, answers, clean_environment, reserved_port, running

# Of aiohttp, about adlfs's way of sending: the event loop is adlfs's own, and nothing else waits for it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere: https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def connection_string() -> Iterator[str]:
    """Start an empty Azurite, and yield its connection string."""
    program = from_servers_environment("azurite-blob", folder="node_modules/.bin")
    with reserved_port() as port:
        endpoint_url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        azurite = Program(
            name="Azurite",
            command=[
                *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port)),
                *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"),
            ],
            environment=clean_environment(),
            is_ready=lambda timeout_s: answers(endpoint_url, timeout_s=timeout_s),
        )
        with running(azurite, start_timeout_s=60.0):
            yield (
                f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
                f"BlobEndpoint={endpoint_url};"
            )


@pytest.fixture
def container(connection_string: str) -> str:
    name = uuid.uuid4().hex
    fsspec.filesystem("az", connection_string=connection_string, skip_instance_cache=True).mkdir(name)
    return name


def _open(container: str, connection_string: str) -> Store:
    options = cloudckpt.Options(storage_options={"connection_string": connection_string})
    return open_store(f"az://{container}/run", options)


class TestContractOnAzure(StoreContract):
    """Every clause, races between threads and processes among them."""

    shared_between_processes = True
    num_paging_keys = 40  # Azure's pages have 5,000, which takes Azurite minutes

    @pytest.fixture
    def store(self, connection_string: str, container: str) -> Store:
        return _open(container, connection_string)

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_work_everywhere(self, store: Store, key: str) -> None:
        r"""Azure takes ``\`` for ``/``, so such a key comes back as another; all others do not."""
        put(store, key, b"body")
        assert content(store, key) == b"body"
        assert keys(store) == [key.replace("\\", "/")]

    def test_create_if_absent_is_declared(self, store: Store) -> None:
        """The clauses about it pass without it, too."""
        assert store.capabilities.conditional_create


@pytest.mark.parametrize("protocol", ["az", "abfs"])
def test_a_run_saves_restores_and_collects_on_azure(connection_string: str, container: str, protocol: str) -> None:
    """If this fails, Azure loses a checkpoint to a second save, loads other bytes, or keeps garbage."""
    options = cloudckpt.Options(storage_options={"connection_string": connection_string})
    root = f"{protocol}://{container}/run"
    uri = f"{root}/step-1"
    cloudckpt.save({"weight": torch.ones(1000)}, uri, options=options)
    with pytest.raises(cloudckpt.CheckpointExistsError):
        cloudckpt.save({"weight": torch.zeros(1000)}, uri, options=options)
    loaded = {"weight": torch.zeros(1000)}
    cloudckpt.load(loaded, uri, options=options)
    assert torch.equal(loaded["weight"], torch.ones(1000))
    found = cloudckpt.latest(root, options=options)
    assert found is not None
    assert found.uri == uri
    cloudckpt.save({"weight": torch.full((1000,), 2.0)}, uri, overwrite=True, options=options)
    store = open_store(uri, options)
    garbage = "data/20200101T000000000Z-0123456789ab/0-0.safetensors"
    put(store, garbage, b"what a killed save has left")
    before = set(keys(store))
    assert cloudckpt.gc(root, older_than=0.001, dry_run=False, options=options).num_objects
    assert garbage in before - set(keys(store))
    cloudckpt.load(loaded, uri, options=options)
    assert torch.equal(loaded["weight"], torch.full((1000,), 2.0))
    report = examine(root, options=options)
    assert report.is_healthy, str(report)
