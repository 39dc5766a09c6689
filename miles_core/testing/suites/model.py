"""What every model adapter and every resolver promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output
from miles_core.contracts.model import ModelSource
from miles_core.errors import CapabilityError, ModelSourceError
from miles_core.provider import Place
from miles_core.testing.suite import Conformance, check, refuses
from miles_core.testing.suites import batches

Array = np.ndarray[Any, Any]


class ModelConformance(Conformance):
    """Override `source` and `vocab_size`; and `named` and `numbers` for modules and tensors that are not the toys'."""

    kind = "model"
    places: ClassVar[tuple[Place, ...]] = (Place.TRAINER,)
    vocab_size = 15
    close_to = 1e-5

    def source(self) -> ModelSource:
        architecture = {"model_type": "toy", "vocab_size": self.vocab_size, "order": 2, "scale": 1.0}
        return ModelSource(asked="conformance", architecture=architecture)

    def adapter(self) -> Any:
        return self.build(Place.TRAINER, model=self.source())

    def example(self, place: Place) -> Any:
        return self.adapter()

    def probe(self) -> None:
        self.adapter().build(self.source(), 0)

    def named(self, module: Any) -> list[tuple[str, Any]]:
        """Names and tensors of a module, as a backend hands them to `export`."""
        if hasattr(module, "state_dict"):
            return list(module.state_dict().items())
        return list(module.weights().items())

    def numbers(self, x: Any) -> Array:
        if isinstance(x, np.ndarray):
            return np.asarray(x, np.float64)
        if hasattr(x, "detach") and hasattr(x, "cpu"):
            return np.asarray(x.detach().double().cpu().numpy())
        return np.asarray(x.value)

    def attached(self, x: Any) -> bool:
        return bool(getattr(x, "requires_grad", not isinstance(x, np.ndarray)))

    def stream(self, adapter: Any, module: Any) -> dict[str, Array]:
        return {spec.name: self.numbers(t) for spec, t in adapter.export(module, iter(self.named(module)))}

    def test_build(self) -> None:
        adapter = self.adapter()
        one, two = (self.stream(adapter, adapter.build(self.source(), 5)) for _ in range(2))
        same = set(one) == set(two) and all(np.array_equal(one[n], two[n]) for n in one)
        check("the same seed builds the same bits", same, sorted(one))
        other = self.stream(adapter, adapter.build(self.source(), 6))
        differs = any(not np.array_equal(one[n], other[n]) for n in one)
        check("another seed builds another model", differs)
        blocks = adapter.blocks(adapter.build(self.source(), 5))
        check("blocks are a sequence", hasattr(blocks, "__len__") and hasattr(blocks, "__getitem__"), blocks)

    def test_cost(self) -> None:
        adapter = self.adapter()
        lengths = np.array([1, 2, 7, 64, 500], np.int64)
        cost = np.asarray(adapter.cost(lengths))
        shaped = cost.dtype == np.float64 and cost.shape == lengths.shape
        check("cost is float64, one per trajectory", shaped, cost)
        check("cost is above 0 and rises with length", (cost > 0).all() and (np.diff(cost) > 0).all(), cost)

    def test_outputs(self) -> None:
        adapter = self.adapter()
        module = adapter.build(self.source(), 5)
        batch = batches.batch_of(batches.groups(self.vocab_size))
        found = adapter.outputs(module, batch, [LOGPROBS, ENTROPY])
        check("outputs come under their names", set(found) == {"logprobs", "entropy"}, sorted(found))
        logprobs, entropy = self.numbers(found["logprobs"]), self.numbers(found["entropy"])
        shaped = logprobs.shape == entropy.shape == (batch.units,)
        check("outputs have one row per unit", shaped, (logprobs.shape, entropy.shape))
        check("log-probabilities are at most 0", (logprobs <= 1e-6).all() and np.isfinite(logprobs).all(), logprobs)
        firsts = logprobs[batch.offsets[:-1]]
        check("the first token of a trajectory has log-probability 0", not firsts.any(), firsts)
        sane = (entropy >= -1e-6).all() and (entropy <= np.log(self.vocab_size) + 1e-5).all()
        check("entropy lies between 0 and that of chance", sane, entropy)
        check("an output with grad carries it", self.attached(found["logprobs"]))
        plain = adapter.outputs(module, batch, [Output(name="logprobs")])["logprobs"]
        check("an output without grad is detached", not self.attached(plain))
        backwards = batches.batch_of(list(reversed(batches.groups(self.vocab_size))))
        turned = self.numbers(adapter.outputs(module, backwards, [Output(name="logprobs")])["logprobs"])
        a, b = batches.by_trajectory(batch, logprobs), batches.by_trajectory(backwards, turned)
        near = all(np.allclose(a[n], b[n], atol=self.close_to) for n in a)
        check("outputs do not depend on neighbours or order", near, (a, b))
        odd = [Output(name="conformance_nonsense")]
        refuses(
            "an unknown output is refused with CapabilityError",
            CapabilityError,
            lambda: adapter.outputs(module, batch, odd),
        )

    def test_export(self) -> None:
        adapter = self.adapter()
        module = adapter.build(self.source(), 5)
        stream = list(adapter.export(module, iter(self.named(module))))
        names = [spec.name for spec, _ in stream]
        check("every tensor is exported once", len(names) == len(set(names)) > 0, names)
        known = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
        odd = [s for s, t in stream if s.dtype not in known or tuple(s.shape) != tuple(t.shape)]
        check("specs say dtype and shape", not odd, odd)
        with self.folder() as folder:
            adapter.save_config(module, folder)
            check("save_config writes config.json", (folder / "config.json").exists(), list(folder.iterdir()))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            check("config.json says the model's type", isinstance(config.get("model_type"), str), config)

    def test_missing_folder(self) -> None:
        nowhere = Path("/nonexistent/conformance")
        source = ModelSource(asked=str(nowhere), folder=nowhere)
        refuses(
            "a folder that is not there is refused with ModelSourceError",
            ModelSourceError,
            lambda: self.adapter().build(source, 0),
        )


class ResolverConformance(Conformance):
    """Override `sample`: write a source of your kind into a folder and return its name."""

    kind = "model"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)

    def sample(self, folder: Path) -> str:
        """A `.toy` file."""
        path = folder / "sample.toy"
        path.write_text(json.dumps({"config": {"vocab_size": 4, "order": 1}, "bias": [0.0, 1.0, 2.0, 3.0]}))
        return str(path)

    def example(self, place: Place) -> Any:
        return self.build(place)

    def test_resolve(self) -> None:
        with self.folder() as folder:
            source, cache = self.sample(folder), folder / "cache"
            found = self.build(Place.CONTROLLER).resolve(source, cache, 60.0)
            whole = isinstance(found, Path) and (found / "config.json").exists()
            check("a source becomes a folder with config.json", whole, found)
            before = {p.name: p.stat().st_mtime_ns for p in found.iterdir()}
            again = self.build(Place.CONTROLLER).resolve(source, cache, 60.0)
            same = again == found and before == {p.name: p.stat().st_mtime_ns for p in again.iterdir()}
            check("a source is converted once", same, (found, again))
            inside = cache in found.parents
            check("what is converted lies in the cache", inside, found)
            for path in sorted(found.rglob("*"))[1:]:
                path.unlink()
            healed = self.build(Place.CONTROLLER).resolve(source, cache, 60.0)
            names = {p.name for p in healed.iterdir()}
            check("a half-written cache is made whole", set(before) <= names, (before, names))
            missing = str(folder / ("nothing" + Path(source).suffix))
            refuses(
                "a source that is not there is refused with ModelSourceError",
                ModelSourceError,
                lambda: self.build(Place.CONTROLLER).resolve(missing, cache, 60.0),
            )
