"""What `miles conformance sync:bucketed` tests: both paths."""

from typing import Any, ClassVar

from miles_core.testing import TransportConformance


class InProcessConformance(TransportConformance):
    name = "bucketed"


class SharedMemoryConformance(InProcessConformance):
    options: ClassVar[dict[str, Any]] = {"path": "shared_memory"}
