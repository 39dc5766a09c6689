"""Weight manifests, digests by piece, receipts, and the gate that decides which engine may serve which version.

Nothing here moves a byte: transports do (`contracts/weights.py`), and `publish.py` drives them. This file promises that
no engine serves a version unless the engine's own receipt agrees with the manifest in every digest that is due.

Digests are xxh3-128 hex over a piece's little-endian contiguous bytes. The root of a manifest is xxh3-128 over the
sorted lines `name\\0piece\\0digest`, a piece being spelled as the canonical JSON of `[offsets, shape]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import xxhash

from miles_core.contracts.weights import Evidence, Manifest, Piece, Receipt, TensorSpec
from miles_core.errors import WeightError
from miles_core.records import Array, Version

#: Weakest first: a receipt must rest on at least what `sync.verify` names.
STRENGTH: dict[Evidence, int] = {evidence: rank for rank, evidence in enumerate(Evidence)}


def digest(data: Any) -> str:
    """xxh3-128 hex of a contiguous buffer (bytes, memoryview, `uint8` array); no copy is made."""
    return str(xxhash.xxh3_128_hexdigest(data))


def array_bytes(array: Array) -> Array:
    """The little-endian contiguous bytes of `array` as a flat uint8 view; copies only where it has to."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)


def piece_of(array: Any, piece: Piece) -> Any:
    """The part of a NumPy array or torch tensor that `piece` covers, as a view."""
    return array[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))]


def piece_digests(spec: TensorSpec, array: Array) -> tuple[str, ...]:
    """One digest per piece of `spec`, from a NumPy array that holds the whole tensor."""
    if array.shape != spec.shape:
        what = f"tensor {spec.name!r} has shape {list(array.shape)}; its spec says {list(spec.shape)}"
        raise WeightError(what, fix="export the shape that the dry pass announced")
    return tuple(digest(array_bytes(piece_of(array, piece) if spec.pieces else array)) for piece in spec.boxes())


def piece_key(piece: Piece) -> str:
    """Canonical JSON of `[offsets, shape]`."""
    return orjson.dumps([list(piece.offsets), list(piece.shape)]).decode()


def manifest_root(tensors: Iterable[TensorSpec], digests: Mapping[str, Sequence[str]]) -> str:
    """xxh3-128 hex over the sorted lines `name\\0piece\\0digest`; does not depend on the order of tensors."""
    lines = [
        f"{spec.name}\0{piece_key(piece)}\0{value}"
        for spec in tensors
        for piece, value in zip(spec.boxes(), digests[spec.name], strict=True)
    ]
    return digest("\n".join(sorted(lines)).encode())


def make_manifest(
    version: Version, tensors: Sequence[TensorSpec], digests: Mapping[str, Sequence[str]], base_root: str | None = None
) -> Manifest:
    """A manifest with its root. Raises `WeightError` for a name that occurs twice or a piece without a digest."""
    names = [spec.name for spec in tensors]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise WeightError(f"the weight stream of {version} names {twice} twice", fix="export tied tensors once")
    for spec in tensors:
        found = len(digests.get(spec.name, ()))
        if found != len(spec.boxes()):
            what = f"tensor {spec.name!r} of {version} has {len(spec.boxes())} pieces and {found} digests"
            raise WeightError(what, fix="digest every piece while staging")
    return Manifest(
        version=version,
        tensors=tuple(tensors),
        digests={spec.name: tuple(digests[spec.name]) for spec in tensors},
        root=manifest_root(tensors, digests),
        base_root=base_root,
    )


def check_receipt(manifest: Manifest, receipt: Receipt, minimum: Evidence, due: Iterable[str] | None = None) -> None:
    """Raise `WeightError` unless `receipt` proves `manifest` by evidence of at least `minimum`.

    `due` names the tensors whose digests must be there; all where `None`. A digest that is there must agree, due or
    not. Evidence below `received` carries no digests and is the engine's own word about the version.
    """

    def refuse(what: str) -> WeightError:
        return WeightError(
            f"engine {receipt.engine!r} may not serve {manifest.version}: {what}",
            fix="see the engine's log; the member is sent all weights again before it serves",
        )

    if receipt.version != manifest.version:
        raise refuse(f"its receipt is for {receipt.version}")
    if STRENGTH[receipt.evidence] < STRENGTH[minimum]:
        raise refuse(f"its evidence is {receipt.evidence.value!r}, sync.verify asks for {minimum.value!r} or stronger")
    for name, found in receipt.digests.items():
        wanted = manifest.digests.get(name)
        if wanted is None:
            raise refuse(f"it reports a tensor {name!r} that the version does not hold")
        for i, (have, want) in enumerate(zip(found, wanted, strict=False)):
            if have != want:
                raise refuse(f"tensor {name!r} differs in piece {i}: {have} in place of {want}")
        if len(found) != len(wanted):
            raise refuse(f"tensor {name!r} has {len(found)} digests in place of {len(wanted)}")
    if STRENGTH[receipt.evidence] >= STRENGTH[Evidence.RECEIVED]:
        missing = sorted(set(manifest.digests if due is None else due) - set(receipt.digests))
        if missing:
            raise refuse(f"{len(missing)} digests are missing, {missing[0]!r} first")
    if receipt.root is not None and receipt.root != manifest.root:
        raise refuse(f"its root is {receipt.root}, the version's is {manifest.root}")


class Rotation:
    """Which tensors a link checks in place, so that every one is checked within `within` publications.

    Counts its own publications, so a link that missed some versions still covers everything. 1 checks all, always.
    """

    def __init__(self, within: int = 1) -> None:
        self.within = within
        self._turn = 0

    def next(self, tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The tensors of this publication; the first publication of a link checks all."""
        turn, self._turn = self._turn, self._turn + 1
        if turn == 0:
            return list(tensors)
        ordered = sorted(tensors, key=lambda spec: spec.name)
        return [spec for i, spec in enumerate(ordered) if i % self.within == turn % self.within]


class ServingGate:
    """Who serves what. A member serves a version on its own receipt only; nothing else opens the gate.

    Versions whose weights did not change are aliases: a member that serves the old one serves the alias too, and
    `named` translates the version that the engine writes on its tokens.
    """

    def __init__(self, *, minimum: Evidence = Evidence.LIVE, within: int = 1) -> None:
        self.minimum = minimum
        self.within = within
        self._serves: dict[str, dict[str, Version]] = {}  # engine -> policy -> version on its last receipt
        self.aliases: dict[Version, Version] = {}
        self._checked: dict[str, dict[str, dict[str, int]]] = {}  # engine -> policy -> tensor -> receipts since

    def admit(self, manifest: Manifest, receipt: Receipt) -> None:
        """Let `receipt.engine` serve `manifest.version`; `WeightError` (and no change) where the receipt falls short.

        With `within` n, a tensor is due when its digest was not in one of the last n - 1 receipts of this member.
        """
        policy = manifest.version.policy
        checked = self._checked.setdefault(receipt.engine, {})
        age = checked.get(policy, {})
        due = [name for name in manifest.digests if age.get(name, self.within) + 1 >= self.within]
        check_receipt(manifest, receipt, self.minimum, due)
        checked[policy] = {n: 0 if n in receipt.digests else age.get(n, 0) + 1 for n in manifest.digests}
        self._serves.setdefault(receipt.engine, {})[policy] = manifest.version

    def alias(self, old: Version, new: Version) -> None:
        """`new` holds the very weights of `old`: who serves one serves the other."""
        if old.policy != new.policy or self.named(old) != old or not self.serving(old):
            raise WeightError(f"{new} cannot stand for {old}, which no engine serves", fix="publish it with weights")
        self.aliases[old] = new

    def named(self, version: Version) -> Version:
        """The newest alias of `version`."""
        while version in self.aliases:
            version = self.aliases[version]
        return version

    def version(self, engine: str, policy: str) -> Version | None:
        """What `engine` may serve of `policy`, by its newest alias."""
        found = self._serves.get(engine, {}).get(policy)
        return None if found is None else self.named(found)

    def serving(self, version: Version) -> tuple[str, ...]:
        """The engines that may serve exactly `version`."""
        return tuple(e for e in self._serves if self.version(e, version.policy) == self.named(version))

    def revoke(self, engine: str) -> None:
        """The member serves nothing until its next receipt, which must cover every tensor again."""
        self._serves.pop(engine, None)
        self._checked.pop(engine, None)

    def state(self) -> dict[str, Any]:
        """What gates of other processes `follow`."""
        serves = {engine: list(held.values()) for engine, held in self._serves.items()}
        return {"serves": serves, "aliases": list(self.aliases.items())}

    def follow(self, state: Mapping[str, Any]) -> None:
        """Take over what the controller's gate decided (in sampler processes, which see no receipts)."""
        self._serves = {engine: {v.policy: v for v in held} for engine, held in state["serves"].items()}
        self.aliases = dict(state["aliases"])
