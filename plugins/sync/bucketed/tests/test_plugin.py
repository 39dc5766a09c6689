"""The provider: light to import, and what it builds at each place."""

import subprocess
import sys

import pytest
from miles_sync_bucketed.config import BucketedConfig
from miles_sync_bucketed.plugin import miles_sync

from miles_core.config.schema import SyncKeys
from miles_core.contracts.weights import Link, Sender, Transport
from miles_core.errors import PluginContractError
from miles_core.provider import BuildContext, Place


def test_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, miles_sync_bucketed.plugin\n"
        "assert not {'torch', 'numpy', 'omegaconf', 'xxhash'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Engine:
    name = "e0"

    def port(self, name):
        return object()


def test_products_by_place():
    provider = miles_sync()
    assert provider.name == "bucketed" and provider.required(BucketedConfig()) == {"weights.tensors"}
    common = {"name": "bucketed", "run": None, "core": SyncKeys()}
    built = {
        Place.CONTROLLER: provider.build(BucketedConfig(), BuildContext(place=Place.CONTROLLER, **common)),
        Place.TRAINER: provider.build(
            BucketedConfig(), BuildContext(place=Place.TRAINER, export=lambda *_: iter(()), **common)
        ),
        Place.ENGINE: provider.build(BucketedConfig(), BuildContext(place=Place.ENGINE, engine=Engine(), **common)),
    }
    assert isinstance(built[Place.CONTROLLER], Transport)
    assert isinstance(built[Place.TRAINER], Sender)
    assert isinstance(built[Place.ENGINE], Link)
    with pytest.raises(PluginContractError, match="needs 'export'"):
        provider.build(BucketedConfig(), BuildContext(place=Place.TRAINER, **common))
