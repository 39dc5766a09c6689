"""The half of the backend suite about roles, exports, and state that is saved and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.config.schema import Decay
from miles_core.contracts.learning import Output
from miles_core.contracts.model import ModelSource
from miles_core.errors import CapabilityError, MilesError
from miles_core.testing.suite import Conformance, check, refuses

REFERENCE = Output(name="logprobs", role="reference")


class BackendState(Conformance):
    """Mixed into `BackendConformance`, which has the helpers."""

    if TYPE_CHECKING:
        array: Any
        backend: Any
        batch: Any
        near: Any
        optimizer: Any
        role: Any
        scores: Any
        vocab_size: int
        weighted: Any
        weights: Any

    def _terms(self) -> list[Any]:
        from miles_core.testing.suites.backend import PlainTerm, bound

        return [bound(PlainTerm())]

    def _with_reference(self) -> Any:
        reference = self.role("reference", init="actor", update="frozen", seed=99)
        return self.backend({"actor": self.role(), "reference": reference})

    def test_roles(self) -> None:
        backend = self._with_reference()
        batch = self.weighted(self.batch(), "loss_term")
        found = backend.score(batch, [REFERENCE])
        check("scores of another role carry its name", set(found) == {"reference.logprobs"}, sorted(found))
        start = np.asarray(found["reference.logprobs"])
        same = np.array_equal(start, self.scores(backend, batch))
        check("a role that starts from the actor scores as the actor does", same, start)
        backend.update(batch, self._terms())
        later = self.scores(backend, batch, REFERENCE, "reference.logprobs")
        check("a frozen role does not move", np.array_equal(start, later), (start, later))
        check("the actor moves away from a frozen role", not np.array_equal(later, self.scores(backend, batch)))
        backend.close()

    def test_blend(self) -> None:
        backend = self._with_reference()
        batch = self.weighted(self.batch(), "loss_term")
        old = self.weights(backend)
        backend.update(batch, self._terms())
        new = self.weights(backend)
        backend.blend("main", "reference", "actor", 1.0)
        kept = self.scores(backend, batch, REFERENCE, "reference.logprobs")
        check("a blend with decay 1 keeps what is there", not np.array_equal(kept, self.scores(backend, batch)))
        backend.blend("main", "actor", "reference", 0.25)
        mixed = {name: (0.25 * new[name] + 0.75 * old[name]).astype(np.float32) for name in old}
        check("a blend is decay · dst + (1 − decay) · src", self.near(mixed, self.weights(backend), 1e-6))
        backend.blend("main", "reference", "actor", 0.0)
        copied = self.scores(backend, batch, REFERENCE, "reference.logprobs")
        check("a blend with decay 0 copies", np.array_equal(copied, self.scores(backend, batch)), copied)
        backend.close()

    def test_export(self) -> None:
        backend = self.backend()
        stream = list(backend.export("main", "full"))
        names = [spec.name for spec, _ in stream]
        check("every tensor is exported once", len(set(names)) == len(names) > 0, names)
        wrong = [spec.name for spec, tensor in stream if tuple(tensor.shape) != tuple(spec.shape)]
        check("exported tensors have the shapes of their specs", not wrong, wrong)
        dry = list(backend.export("main", "full", True))
        same = [s for s, _ in dry] == [s for s, _ in stream]
        check("the dry pass gives the same specs", same, [s.name for s, _ in dry])
        again = {spec.name: self.array(t) for spec, t in backend.export("main", "full")}
        first = {spec.name: self.array(t) for spec, t in stream}
        check("exporting twice gives the same bits", self.near(first, again, 0.0))
        for layout in ("shards", "conformance-nonsense"):
            try:
                list(backend.export("main", layout))
            except CapabilityError:
                continue
            except Exception as error:
                check("a layout that is not there is refused with CapabilityError", False, repr(error))
            check("an unknown layout is refused", layout == "shards", layout)
        backend.close()

    def test_seeds(self) -> None:
        first, second = self.backend(), self.backend()
        other = self.backend({"actor": self.role(seed=6)})
        a, b, c = self.weights(first), self.weights(second), self.weights(other)
        check("the same seed builds the same bits", self.near(a, b, 0.0))
        check("another seed builds another model", not self.near(a, c, 1e-7))
        batch = self.weighted(self.batch(), "loss_term")
        for backend in (first, second):
            for _ in range(3):
                backend.update(batch, self._terms())
        a, b = self.weights(first), self.weights(second)
        check("the same updates give the same bits", self.near(a, b, 0.0))
        for backend in (first, second, other):
            backend.close()

    def test_save_and_load(self) -> None:
        roles = {
            "actor": self.role(optimizer=self.optimizer(decay=Decay.linear)),
            "reference": self.role("reference", update="copy", init="actor"),
        }
        batch = self.weighted(self.batch(), "loss_term")
        straight, resumed = self.backend(roles, total=8), self.backend(roles, total=8)
        for _ in range(3):
            straight.update(batch, self._terms())
        straight.blend("main", "reference", "actor", 0.5)
        with self.folder() as folder:
            straight.save(folder / "trainer")
            for _ in range(2):
                resumed.update(batch, self._terms())
            resumed.load(folder / "trainer")
            refuses("a folder that is no checkpoint is refused", MilesError, lambda: resumed.load(folder / "nothing"))
            resumed.load(folder / "trainer")
        same = self.near(self.weights(straight), self.weights(resumed), 0.0)
        check("load restores the weights bit for bit", same)
        a = self.scores(straight, batch, REFERENCE, "reference.logprobs")
        b = self.scores(resumed, batch, REFERENCE, "reference.logprobs")
        check("load restores every role", np.array_equal(a, b), (a, b))
        one, two = (backend.update(batch, self._terms()) for backend in (straight, resumed))
        check("load restores the position of the schedule", one.metrics["lr"] == two.metrics["lr"], (one, two))
        same = self.near(self.weights(straight), self.weights(resumed), 0.0)
        check("a resumed update equals the uninterrupted one bit for bit", same, (one, two))
        straight.close()
        resumed.close()

    def test_save_model(self) -> None:
        backend = self.backend()
        batch = self.weighted(self.batch(), "loss_term")
        backend.update(batch, self._terms())
        with self.folder() as folder:
            target = folder / "model"
            target.mkdir()
            backend.save_model("main", target)
            written = (target / "config.json").exists()
            check("a saved model has a config.json", written, sorted(p.name for p in target.iterdir()))
            source = ModelSource(asked=str(target), folder=target)
            loaded = self.backend({"actor": self.role(source=source)})
            a, b = self.scores(backend, batch), self.scores(loaded, batch)
            check("a saved model loads and scores the same", np.allclose(a, b, atol=1e-5), (a, b))
            loaded.close()
        backend.close()

    def test_offload(self) -> None:
        backend = self.backend()
        before = self.weights(backend)
        backend.offload(["weights", "optimizer"])
        backend.onload(["weights", "optimizer"])
        check("offloading and onloading changes nothing", self.near(before, self.weights(backend), 0.0))
        backend.close()
