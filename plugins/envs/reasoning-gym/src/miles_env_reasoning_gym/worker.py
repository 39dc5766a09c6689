"""The child process: builds data sets, draws items and judges answers.

It runs with `PYTHONHASHSEED=0`: some data sets walk over sets of strings, and would give other items in every process.
The parent never imports reasoning-gym.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import json
import math
import re
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

from miles_core.verifying.sandbox import Refused, arm, said, serve

BIG = 2**31 - 1  # items are numbered below this
SIZE = 500  # items of one seed, for data sets that have no more
CHUNKS = 16  # seeds of those
KEPT_DATASETS, KEPT_ITEMS = 128, 64
#: Modules of reasoning-gym whose verifiers evaluate the answer as Python.
EVALUATING = (
    *("algorithmic.string_insertion", "algorithmic.spiral_matrix", "algorithmic.number_sorting"),
    *("algorithmic.binary_matrix", "games.n_queens"),
)
#: Numbers at which no distance is large: min(1, exp(-nan)) is 1.
_NOT_FINITE = re.compile(r"[\s()+\-*.\dij]*(nan|inf|infinity)[\s()+\-*.\dij]*", re.IGNORECASE)


class Catalogue:
    """Data sets and items, the latest ones kept."""

    def __init__(self) -> None:
        self._built: OrderedDict[str, Any] = OrderedDict()
        self._items: OrderedDict[tuple[str, int], Any] = OrderedDict()
        self._bounded: dict[str, bool] = {}

    def dataset(self, spec: dict[str, Any], seed: int) -> Any:
        key = json.dumps([spec, seed], sort_keys=True)
        if key not in self._built:
            self._built[key] = _built(spec, seed)
            while len(self._built) > KEPT_DATASETS:
                self._built.popitem(last=False)
        return self._built[key]

    def bounded(self, spec: dict[str, Any]) -> bool:
        """Whether the data set makes a list of `size` items beforehand, in place of one item a number."""
        key = json.dumps(spec, sort_keys=True)
        if key not in self._bounded:
            try:
                self.dataset(spec, 0)[BIG]
            except IndexError:
                self._bounded[key] = True
            except Exception:
                self._bounded[key] = False  # this one item is bad; others may be fine
            else:
                self._bounded[key] = False
        return self._bounded[key]

    def item(self, spec: dict[str, Any], index: int) -> tuple[Any, dict[str, Any]]:
        """(data set, item)."""
        seed, place = 0, index
        if self.bounded(spec):
            seed, place = divmod(index % (SIZE * CHUNKS), SIZE)
            seed *= SIZE  # items are drawn from seed + place
        dataset = self.dataset(spec, seed)
        key = (json.dumps(spec, sort_keys=True), index)
        if key not in self._items:
            self._items[key] = dataset[place]
            while len(self._items) > KEPT_ITEMS:
                self._items.popitem(last=False)
        return dataset, self._items[key]


def _built(spec: dict[str, Any], seed: int) -> Any:
    from reasoning_gym.factory import DATASETS

    name, options = spec["name"], dict(spec["options"])
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3, 0.6)
        what = f"write {near[0]}, if that was meant" if near else "choose one of " + ", ".join(sorted(DATASETS))
        also = f"; close ones: {', '.join(near)}" if near else ""
        raise Refused(f"reasoning-gym has no data set {name!r}{also}", what)
    if name == "composite":
        raise Refused("composite is a mixture of data sets, and Miles mixes them itself", "list them under `datasets`")
    dataset_cls, config_cls = DATASETS[name]
    fields = [f for f in config_cls.__dataclass_fields__ if f not in ("seed", "size")]
    for key in options:
        if key in ("seed", "size"):
            raise Refused(f"{name}: {key} is set by Miles: items are drawn from run.seed without end", f"remove {key}")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0.5)
            fix = f"write {near[0]}, if that was meant" if near else f"remove {key}"
            raise Refused(f"{name} has no option {key!r}; it has {', '.join(fields) or 'none'}", fix)
    wanted = {**options, **_level(spec, options)}
    try:
        config = config_cls(**wanted, seed=seed, size=SIZE)
        if hasattr(config, "validate"):
            config.validate()
        return dataset_cls(config)
    except Exception as error:
        shown = ", ".join(f"{k}: {v}" for k, v in wanted.items()) or "its defaults"
        raise Refused(f"{name} refuses {shown}: {said(error)}", "change its options or level") from error


def _level(spec: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What the data set's own curriculum sets at the level of `spec`."""
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.factory import create_curriculum, has_curriculum

    name, level = spec["name"], spec["level"]
    if level is None:
        return {}
    if not has_curriculum(name):
        raise Refused(f"{name} has no levels in reasoning-gym", "set its difficulty through options")
    curriculum = create_curriculum(name)
    levels = {key: len(attribute.levels) for key, attribute in curriculum.attributes.items()}
    highest = max(levels.values(), default=1) - 1
    shown = ", ".join(f"{key} 0 to {count - 1}" for key, count in levels.items())
    if isinstance(level, int):
        if not 0 <= level <= highest:
            raise Refused(f"{name} has no level {level}", f"choose a level from 0 to {highest}")
        curriculum.set_global_level(level)
    else:
        for key, value in level.items():
            if key not in levels or not 0 <= value < levels[key]:
                raise Refused(f"{name} has no level {key}: {value}; it has {shown}", "choose among those")
            curriculum.set_attr_level(key, value)
    context = DefaultCurriculumContext(mode=RangeAttributeMode(spec["ranges"]))
    made = curriculum.generate_configuration(context=context)
    names = set()
    for attribute in curriculum.attributes.values():
        fields = ("field_name", "lower_field_name", "upper_field_name")
        names |= {getattr(attribute, field) for field in fields if hasattr(attribute, field)}
    if both := sorted(names & set(options)):
        raise Refused(f"{name}: {', '.join(both)} is set by level and by options", "drop the option, or the level")
    return {key: getattr(made, key) for key in sorted(names)}


def digest(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def split_of(question: str, eval_share: float) -> str:
    """`train` or `eval`: a property of the question's text alone, so that neither seed nor level makes them meet."""
    return "eval" if int(digest(question)[:16], 16) < eval_share * 2**64 else "train"


class Worker:
    def __init__(self, catalogue: Catalogue, deadline_s: float) -> None:
        self._catalogue, self._deadline_s = catalogue, deadline_s

    def check(self, specs: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Builds each data set once."""
        for spec in specs:
            self._catalogue.dataset(spec, 0)
        return {}

    def draw(self, spec: dict[str, Any], seed: int, start: int, limit: int, split: str, share: float) -> dict[str, Any]:
        """The first item of `split` among draws `start` to `limit` of the stream `seed`."""
        raised, last = 0, ""
        for number in range(start, limit):
            stream = hashlib.sha256(f"{seed}/{number}".encode()).digest()
            index = int.from_bytes(stream[:8], "big") % BIG
            arm(self._deadline_s)
            try:
                _, item = self._catalogue.item(spec, index)
                question, answer = item["question"], item["answer"]
            except Exception as error:
                raised, last = raised + 1, said(error)
                continue
            if split_of(question, share) == split:
                answer = None if answer is None else str(answer)
                return {
                    **{"number": number, "index": index, "question": question, "answer": answer},
                    "digest": digest(question),
                }
        return {"tried": limit - start, "raised": raised, "last": last}

    def score(self, spec: dict[str, Any], index: int, digest: str, answer: str) -> dict[str, Any]:
        try:
            dataset, item = self._catalogue.item(spec, index)
        except Exception as error:
            return {"differs": f"making it raises {said(error)}"}
        if globals()["digest"](item["question"]) != digest:
            return {"differs": "it is another question"}
        if _NOT_FINITE.fullmatch(answer):
            return {"score": 0.0}
        try:
            value = dataset.score_answer(answer, item)
        except Exception as error:
            return {"raised": said(error)}
        try:
            number = float(value)
        except (TypeError, ValueError):
            return {"unjudged": f"returned {value!r:.80}, which is not a number"}
        return {"score": number} if math.isfinite(number) else {"unjudged": f"returned {number}"}


def register(modules: list[str], folders: list[str]) -> None:
    """Import what registers further data sets: files, or modules that may lie in `folders`."""
    sys.path[:0] = folders
    for name in modules:
        try:
            if not name.endswith(".py"):
                importlib.import_module(name)
                continue
            spec = importlib.util.spec_from_file_location(f"_miles_datasets_{Path(name).stem}", name)
            assert spec is not None and spec.loader is not None  # a .py file always has a loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
        except Exception as error:
            message = f"modules names {name!r}, and importing it fails: {said(error)}"
            raise Refused(message, "make it importable, or correct the name") from error


def harmless() -> None:
    """Some verifiers `eval` the answer, in view of the reference; there it need be a literal only. sympy's parser runs
    what it reads, too: names that could leave the expression are refused."""
    import sympy
    from sympy.parsing import sympy_parser

    for name in EVALUATING:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    parse = sympy_parser.parse_expr

    def guarded(text: str, *args: Any, **keywords: Any) -> Any:
        if "__" in text:
            raise ValueError("an expression with __ is not read")
        return parse(text, *args, **keywords)

    sympy_parser.parse_expr = sympy.parse_expr = guarded
    for module in [m for name, m in sys.modules.items() if name.startswith(("reasoning_gym.", "sympy."))]:
        if getattr(module, "parse_expr", None) is parse:
            module.parse_expr = guarded  # type: ignore[attr-defined]


def start(settings: dict[str, Any]) -> Worker:
    try:
        import reasoning_gym  # noqa: F401 - registers the data sets
    except Exception as error:
        message = f"reasoning-gym cannot be imported: {said(error)}"
        raise Refused(message, "pip install miles-env-reasoning-gym") from error
    harmless()
    register(settings["modules"], settings["folders"])
    return Worker(Catalogue(), settings["deadline_s"])


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(start, given["deadline_s"], given["memory_mib"], given)
