"""Gate D, capabilities and the plugin lock: every message word for word."""

import inspect
import json

import pytest

from miles_core.compatibility import (
    PROTOCOLS,
    capability_rows,
    check_lock,
    check_product,
    match_capabilities,
    members,
    plugin_lock,
)
from miles_core.config.compose import load
from miles_core.discovery import Loaded
from miles_core.errors import CapabilityError, LockError, PluginContractError
from miles_core.provider import Place, Provider
from miles_core.treehash import tree_hash

BASE = """
model: {use: causal-lm, source: ./tiny}
env: arithmetic
rollout: {use: toy}
backend: sgd
sync: bucketed
algorithm: grpo
"""


def loaded(kind, name="foo"):
    provider = Provider(name=name, config=object, build=lambda c, x: None)
    return Loaded(kind=kind, name=name, major=1, module="", distribution="acme", version="1.0", provider=provider)


# --- gate D ----------------------------------------------------------------------------------------------------------


class Link:
    async def describe(self): ...
    async def connect(self, plan): ...
    async def stage(self, manifest): ...
    async def carry(self, manifest): ...
    async def close(self): ...


def test_a_product_that_keeps_its_protocol_passes():
    check_product(loaded("sync"), Place.ENGINE, Link())


def test_gate_d_lists_what_is_missing():
    class Half:
        carry = "later"

        async def describe(self): ...

        async def connect(self): ...

    with pytest.raises(PluginContractError) as error:
        check_product(loaded("sync"), Place.ENGINE, Half())
    assert error.value.message == (
        "sync plugin 'foo' (acme 1.0) built a Half at place 'engine', which is no miles_core.contracts.weights.Link: "
        "connect() cannot be called as connect(plan): too many positional arguments; "
        "stage() is missing; carry is a str, not a method; close() is missing"
    )
    assert error.value.fix == "run `miles conformance sync:foo` and give what is missing"


def test_gate_d_sees_attributes_and_calls():
    class Stage:
        needs = frozenset()

        def __call__(self, batch): ...

    with pytest.raises(PluginContractError) as error:
        check_product(loaded("stage"), Place.CONTROLLER, Stage())
    assert error.value.message.endswith(
        "learning.Stage: gives is missing; "
        "__call__(batch) cannot be called as __call__(batch, rng): too many positional arguments"
    )


def test_gate_d_takes_any_signature_that_can_be_called_so():
    class Stage:
        needs, gives = frozenset(), ()

        def __call__(self, *anything, **more): ...

    check_product(loaded("stage"), Place.CONTROLLER, Stage())
    check_product(loaded("filter"), Place.CONTROLLER, lambda group, strict=False: None)


def test_gate_d_of_a_place_that_the_kind_does_not_have():
    with pytest.raises(PluginContractError) as error:
        check_product(loaded("backend"), Place.ENGINE, object())
    assert error.value.message == (
        "backend plugin 'foo' (acme 1.0) was built at place 'engine'; a backend plugin is built at: trainer"
    )


def test_gate_d_of_extensions_refuses_a_method_that_would_never_be_called():
    class Good:
        name, columns, rank = "foo", (), 8

        def export(self, stream, layout, policy): ...

    class Typo(Good):
        def colect(self, raw, request): ...

    check_product(loaded("extension"), Place.TRAINER, Good())
    with pytest.raises(PluginContractError) as error:
        check_product(loaded("extension"), Place.TRAINER, Typo())
    assert error.value.message.endswith("colect() is no method of an extension (collect?)")


def test_every_kind_has_a_protocol_at_every_place_where_it_is_built():
    from miles_core import API_VERSIONS

    assert {kind for kind, _ in PROTOCOLS} == set(API_VERSIONS) - {"algorithm"}


@pytest.mark.parametrize(
    "protocol", sorted(set(PROTOCOLS.values()), key=lambda p: p.__name__), ids=lambda p: p.__name__
)
def test_each_member_of_each_protocol_is_asked_for(protocol):
    kind, place = next(key for key, value in PROTOCOLS.items() if value is protocol)

    def method(name):
        asked = getattr(protocol, name, None)
        return asked if inspect.isfunction(asked) else (lambda self: None) if asked else None

    full = {name: method(name) for name in members(protocol)}
    check_product(loaded(kind), place, type("Full", (), full)())
    for name in full:
        if name == "__call__":
            continue
        with pytest.raises(PluginContractError, match=rf"{name}(\(\))? is missing"):
            check_product(loaded(kind), place, type("Less", (), {k: v for k, v in full.items() if k != name})())


# --- capabilities ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compose(plugins, tmp_path):
    catalogue = plugins.parts().catalogue()

    def run(text=BASE, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load(path, overrides, catalogue=catalogue)

    run.catalogue = catalogue
    return run


def test_the_capability_table(compose):
    rows = match_capabilities(compose(), compose.catalogue)
    assert [(r.asked_by, r.capability, r.offered_by, r.met) for r in rows] == [
        ("sync 'bucketed'", "weights.tensors", ("rollout 'toy'",), True),
        ("algorithm of policy 'main'", "logprobs", ("rollout 'toy'",), True),
    ]


def test_an_unmet_capability_names_both_sides_and_what_would_fit(compose):
    with pytest.raises(CapabilityError) as error:
        match_capabilities(compose(BASE, "rollout.use=blind"), compose.catalogue)
    assert error.value.message == (
        "sync 'bucketed' needs 'weights.tensors', and nothing in the run offers it; "
        "rollout 'blind' offers logprobs; launcher 'inline' offers in_process"
    )
    assert error.value.fix == "use one of: rollout 'plain' (acme-parts), rollout 'toy' (acme-parts)"


def test_every_engine_must_offer_it(compose):
    text = BASE.replace("rollout: {use: toy}", "engines: {main: {use: toy}, judge: {use: blind}}")
    run = compose(text)
    [row, *_] = capability_rows(run, compose.catalogue)
    assert (row.offered_by, row.met) == (("rollout 'main' (toy)",), False)
    with pytest.raises(CapabilityError) as error:
        match_capabilities(run, compose.catalogue)
    assert "and only rollout 'main' (toy) offers it;" in error.value.message


def test_core_asks_for_the_pause_that_is_configured_only_where_requests_can_be_in_flight(compose):
    asked = "schedule.on_update=recompute"
    assert match_capabilities(compose(BASE, asked), compose.catalogue)
    run = compose(BASE, asked, "schedule.max_staleness=1", "schedule.off_policy=uncorrected")
    with pytest.raises(CapabilityError) as error:
        match_capabilities(run, compose.catalogue)
    assert error.value.message.startswith("schedule.on_update of policy 'main' needs 'pause.recompute', and nothing ")
    assert error.value.fix == (
        "no installed plugin offers it; choose something else than schedule.on_update of policy 'main'"
    )


def test_siblings_are_a_matter_of_group_size_and_no_part_offers_them(compose):
    rows = match_capabilities(compose(BASE, "algorithm.advantage=mine"), compose.catalogue)
    assert "siblings" not in [row.capability for row in rows]


def test_a_requirement_of_an_extension_is_matched_too(compose):
    with pytest.raises(CapabilityError, match=r"extension 'silent' needs 'routed_experts'"):
        match_capabilities(compose(BASE, "extensions.silent={}"), compose.catalogue)


# --- the lock --------------------------------------------------------------------------------------------------------


def test_the_lock_names_core_and_every_chosen_distribution(compose):
    run = compose()
    lock = plugin_lock(run.parts(), compose.catalogue)
    assert lock["format"] == 1 and list(lock["distributions"]) == ["acme-parts", "miles-core"]
    assert lock["distributions"]["acme-parts"]["version"] == "2.0"
    assert len(lock["distributions"]["miles-core"]["sha256"]) == 64
    check_lock(json.loads(json.dumps(lock)), compose.catalogue)


def test_the_lock_says_everything_that_differs(compose, plugins):
    lock = plugin_lock(compose().parts(), compose.catalogue)
    module = plugins.folder / f"{plugins.modules[-1]}.py"
    module.write_text(module.read_text() + "\n# changed\n")
    lock["distributions"]["acme-gone"] = {"version": "1", "sha256": "0"}
    lock["distributions"]["miles-core"] = {"version": "0.0.9", "sha256": "0"}
    with pytest.raises(LockError) as error:
        check_lock(lock, compose.catalogue)
    new, old = tree_hash([module.stem])[:12], lock["distributions"]["acme-parts"]["sha256"][:12]
    assert error.value.message == (
        "what is installed differs from the plugin lock: "
        f"acme-parts 2.0 has other files ({new}, locked {old}); miles-core is 0.1.0, locked 0.0.9; "
        "acme-gone 1 is not installed"
    )
    assert error.value.fix == (
        "install what the lock names, or go on with what is installed in a new run from a checkpoint of this one "
        "(run.name=NEW model.source=RUN model.architecture=null); RUN@STEP starts from another checkpoint than its "
        "best or latest"
    )


def test_a_lock_of_another_format_is_refused(compose):
    with pytest.raises(LockError, match="the plugin lock has format 2"):
        check_lock({"format": 2}, compose.catalogue)


def test_the_tree_hash_sees_names_and_contents_and_no_bytecode(plugins):
    package = plugins.folder / "acme_pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "inner" / "data.txt").write_text("x")
    first = tree_hash(["acme_pkg.plugin", "acme_pkg.other:thing"])
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("noise")
    assert tree_hash(["acme_pkg.plugin"]) == first
    (package / "inner" / "data.txt").rename(package / "inner" / "renamed.txt")
    assert tree_hash(["acme_pkg.plugin"]) != first
    assert tree_hash(["acme_absent"]) == tree_hash([])


def test_a_namespace_package_is_hashed_one_level_down(plugins):
    for name in ("one", "two"):
        (plugins.folder / "acme_space" / name).mkdir(parents=True)
        (plugins.folder / "acme_space" / name / "__init__.py").write_text("")
    first = tree_hash(["acme_space.one.plugin"])
    (plugins.folder / "acme_space" / "two" / "__init__.py").write_text("# other")
    assert tree_hash(["acme_space.one.plugin"]) == first
    (plugins.folder / "acme_space" / "one" / "__init__.py").write_text("# other")
    assert tree_hash(["acme_space.one.plugin"]) != first
