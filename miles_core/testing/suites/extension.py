"""What every extension promises, for whichever of the optional methods it has."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import Level
from miles_core.contracts.engine import Request
from miles_core.contracts.weights import TensorSpec
from miles_core.errors import CapabilityError
from miles_core.provider import Place
from miles_core.records import Sampling
from miles_core.testing.suite import Conformance, check
from miles_core.testing.suites import batches
from miles_core.testing.toys.view import ToyView

Array = np.ndarray[Any, Any]


class ExtensionConformance(Conformance):
    """Override `raw` (an engine's answer), `module` (a model to transform) and `stream` (what such a model exports)."""

    kind = "extension"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.SAMPLER, Place.TRAINER)
    tokens = 3

    def example(self, place: Place) -> Any:
        return self.build(place)

    def extension(self) -> Any:
        return self.build(Place.TRAINER)

    def request(self) -> Request:
        prompt = {"tokens": np.array([2, 3], np.int32)}
        return Request(id="r", policy="main", prompt=prompt, sampling=Sampling(max_new_tokens=4), seed=7)

    def raw(self, request: Request) -> dict[str, Any]:
        """The columns of a completion of `self.tokens` tokens that grants every wish of `request`."""
        n = self.tokens
        base = {"tokens": np.arange(2, 2 + n, dtype=np.int32), "logprobs": np.full(n, -1.0, np.float32)}
        specs = {spec.name: spec for spec in self.extension().columns}
        wishes = {w: np.zeros(n, specs[w].dtype) for w in request.want if w in specs}
        return base | wishes

    def module(self) -> Any:
        from miles_core.contracts.model import ModelSource
        from miles_core.testing.toys.adapter import ToyAdapter

        return ToyAdapter(15).build(ModelSource(asked="toy", architecture={"model_type": "toy"}), 3)

    def stream(self, module: Any) -> list[tuple[TensorSpec, Any]]:
        weights = module.weights()
        return [(TensorSpec(name=n, shape=a.shape, dtype="F32"), a) for n, a in weights.items()]

    def numbers(self, tensor: Any) -> Array:
        return np.asarray(tensor, np.float64)

    def meta(self, stream: list[tuple[TensorSpec, Any]]) -> list[tuple[TensorSpec, Any]]:
        return [(s, np.broadcast_to(np.float32(0), s.shape)) for s, _ in stream]

    # --- tests -------------------------------------------------------------------------------------------------------

    def test_columns(self) -> None:
        extension = self.extension()
        check("an extension has a name", isinstance(extension.name, str) and extension.name, extension)
        odd = [s.name for s in extension.columns if not s.name.startswith(f"{extension.name}.")]
        check("columns carry the extension's name", not odd, odd)
        same = self.extension().columns == extension.columns == self.build(Place.SAMPLER).columns
        check("columns are the same in every place", same, extension.columns)

    def test_on_config(self) -> None:
        extension = self.build(Place.CONTROLLER)
        if not hasattr(extension, "on_config"):
            return
        draft = {"run": {"name": "x", "steps": 5}, "model": {"use": "toy"}, "extensions": {extension.name: {}}}
        before = copy.deepcopy(draft)
        found = extension.on_config(draft)
        check("on_config leaves its argument alone", draft == before, draft)
        check("on_config returns a run file", isinstance(found, dict) and set(before) <= set(found), found)
        json.dumps(found)
        again = extension.on_config(found)
        check("on_config twice is on_config once", again == found, (found, again))

    def test_requests(self) -> None:
        extension = self.build(Place.SAMPLER)
        request = self.request()
        edited = extension.request(request) if hasattr(extension, "request") else request
        check("request returns a request", isinstance(edited, Request), repr(edited))
        same = replace(edited, want=request.want, prompt=request.prompt) == request
        check("request keeps id, policy, seed and sampling", same, edited)
        check("request keeps wishes that were there", request.want <= edited.want, edited.want)
        prompt = np.array_equal(np.asarray(edited.prompt["tokens"]), np.asarray(request.prompt["tokens"]))
        check("request keeps the prompt's tokens", prompt, edited.prompt)
        if not hasattr(extension, "collect"):
            return
        found = extension.collect(self.raw(edited), edited)
        specs = {spec.name: spec for spec in extension.columns}
        odd = sorted(set(found) - set(specs))
        check("collect gives declared columns only", not odd, odd)
        for name, column in found.items():
            if specs[name].level == Level.UNIT:
                rows = len(np.asarray(column))
                check("collected columns have a row for each sampled token", rows == self.tokens, (name, rows))
        try:
            nothing = extension.collect(self.raw(request), request)
        except Exception as error:
            check("collect finds nothing where nothing was asked", False, repr(error))
        check("collect gives nothing that was not asked for", not nothing or edited.want == request.want, nothing)

    def test_micro(self) -> None:
        extension = self.extension()
        if not hasattr(extension, "micro"):
            return
        view = ToyView(batches.batch_of(batches.groups()), lambda output: 0.0)
        for purpose in ("score", "update"):
            for _ in range(2):
                around = extension.micro(view, "actor", purpose)
                check("micro gives a context manager", isinstance(around, AbstractContextManager), repr(around))
                with around as value:
                    check("a micro context yields nothing", value is None, value)
            inner = RuntimeError("from inside")
            try:
                with extension.micro(view, "actor", purpose):
                    raise inner
            except RuntimeError as error:
                check("a micro context lets errors through", error is inner, repr(error))
            else:
                check("a micro context swallows no error", False)

    def test_model_and_export(self) -> None:
        extension = self.extension()
        plain = self.module()
        expected = [spec for spec, _ in self.stream(plain)]
        module = extension.model(self.module(), "actor", "main") if hasattr(extension, "model") else self.module()
        check("model returns a module", module is not None)
        if not hasattr(extension, "export"):
            return
        found = list(extension.export(iter(self.stream(module)), "full", "main"))
        same = sorted(s.name for s, _ in found) == sorted(s.name for s in expected)
        check("export gives the tensors of the plain model", same, [s.name for s, _ in found])
        before = {spec.name: self.numbers(t) for spec, t in self.stream(plain)}
        fresh = all(np.allclose(self.numbers(t), before[s.name]) for s, t in found)
        check("a fresh extension exports the model's own weights", fresh)
        dry = list(extension.export(iter(self.meta(self.stream(module))), "full", "main"))
        specs = sorted(s.name for s, _ in dry) == sorted(s.name for s, _ in found)
        check("export gives the same specs in the dry pass", specs, [s.name for s, _ in dry])
        again = list(extension.export(iter(self.stream(module)), "full", "main"))
        equal = all(
            np.array_equal(self.numbers(a), self.numbers(b)) for (_, a), (_, b) in zip(found, again, strict=True)
        )
        check("exporting twice gives the same bits", equal)
        lazy = extension.export(iter(self.stream(module)), "full", "main")
        check("export is a stream", isinstance(lazy, Iterator), repr(lazy))
        label = "a layout that is not supported is refused with CapabilityError"
        try:
            list(extension.export(iter(self.stream(module)), "conformance-nonsense", "main"))
        except CapabilityError:
            return
        except Exception as error:
            check(label, False, repr(error))
        check(label, False, "no error")
