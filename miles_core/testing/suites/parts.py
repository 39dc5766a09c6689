"""What every filter and every preset promises."""

from __future__ import annotations

import json
import uuid
from dataclasses import fields, replace
from typing import Any, ClassVar

from miles_core.config.schema import FIELD_OF_PROVIDER, PART_FIELDS, AlgorithmKeys, TermKeys
from miles_core.errors import MilesError
from miles_core.provider import Place
from miles_core.records import Status
from miles_core.testing.suite import Conformance, check
from miles_core.testing.suites import batches


class FilterConformance(Conformance):
    """Groups of every shape, in any order."""

    kind = "filter"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)

    def example(self, place: Place) -> Any:
        return self.build(place)

    def groups(self) -> list[Any]:
        """Ordinary groups, a group of one, equal rewards, failed episodes, nothing rewarded, nothing at all."""
        made = batches.groups(sizes=(4, 3, 1))
        first = made[0]
        equal = [replace(e, reward=0.5) for e in first.episodes]
        failed = [replace(e, reward=None, status=Status.FAILED, trajectories=(), error="x") for e in first.episodes]
        variants = [
            equal,
            failed,
            [failed[0], *first.episodes[1:]],
            [replace(e, reward=None) for e in first.episodes],
            [],
        ]
        return [*made, *(replace(first, episodes=tuple(v)) for v in variants)]

    def test_verdicts(self) -> None:
        for group in self.groups():
            try:
                found = self.build(Place.CONTROLLER)(group)
            except Exception as error:
                check("a filter takes every group", False, repr(error))
            good = found is None or (isinstance(found, str) and found.strip() and "\n" not in found)
            check("a verdict is None or a short reason", good, repr(found))

    def test_purity(self) -> None:
        keeper = self.build(Place.CONTROLLER)
        made = self.groups()
        first = [keeper(g) for g in made]
        again = [keeper(g) for g in reversed(made)][::-1]
        check("a verdict depends on its group only", first == again, (first, again))
        turned = [keeper(replace(g, episodes=tuple(reversed(g.episodes)))) is None for g in made]
        same = turned == [v is None for v in first]
        check("a verdict does not depend on the order of episodes", same, (first, turned))


class PresetConformance(Conformance):
    """A pure function to a plain tree of parts that are installed."""

    kind = "algorithm"
    places: ClassVar[tuple[Place, ...]] = ()

    def tree(self) -> Any:
        provider = self.the_provider()
        return provider.build(self.config(), None)  # type: ignore[arg-type]

    def test_tree(self) -> None:
        tree = self.tree()
        check("a preset is a tree of fields", isinstance(tree, dict) and tree, tree)
        try:
            plain = json.loads(json.dumps(tree))
        except (TypeError, ValueError) as error:
            check("a preset is plain data", False, repr(error))
        check("a preset is JSON as it stands", plain == tree, tree)
        known = {*PART_FIELDS, *(f.name for f in fields(AlgorithmKeys))}
        odd = sorted(set(tree) - known)
        check("a preset names known fields only", not odd, odd)
        again = self.tree()
        check("a preset is the same each time", again == tree, (tree, again))
        mark = uuid.uuid4().hex  # of this look: an earlier one may have left its own in what is handed out again
        for value in tree.values():
            if isinstance(value, dict):
                value["conformance"] = mark
        check("a preset hands out a new tree each time", self.tree() == plain, self.tree())
        check("a preset trains something", any(name in plain for name in ("loss", "distill", "value")), sorted(plain))

    def test_parts(self) -> None:
        from miles_core.discovery import scan

        catalogue = scan()
        for name, value in self.tree().items():
            if name not in PART_FIELDS:
                continue
            kinds, plural = PART_FIELDS[name]
            shaped = isinstance(value, dict) or (isinstance(value, str) and not plural)
            check("a part is a mapping", shaped, (name, value))
            chosen = value if plural else {"": {"use": value} if isinstance(value, str) else value}
            for key, part in chosen.items():
                use = (part or {}).get("use", key)
                found = None
                for kind in kinds:
                    try:
                        found = catalogue.load(kind, use).provider
                        break
                    except MilesError:
                        continue
                check("every part is installed", found is not None, (name, use))
                assert found is not None
                field = FIELD_OF_PROVIDER.get(name, name)
                check("every part stands in its field", found.field == field, (name, use, found.field))
                options = {f.name for f in (*fields(found.config), *fields(TermKeys))} | {"use"}
                odd = sorted(set(part or {}) - options)
                check("every option of a part exists", not odd, (name, use, odd))
