"""What the kit needs to test built-ins: a chat template for the renderer `chat`, both styles of the console."""

from typing import Any, ClassVar

from miles_core.builtin.chars import CharsTokenizer
from miles_core.testing import RendererConformance, TrackerConformance

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


class ChatConformance(RendererConformance):
    name = "chat"

    def tokenizer(self) -> Any:
        made = CharsTokenizer("0123456789>+?:abcdefghijklmnopqrstuvwxyz \n")
        made.chat_template = TEMPLATE
        return made


class LinesConformance(TrackerConformance):
    name = "console"
    options: ClassVar[dict[str, Any]] = {"style": "plain"}


class BarsConformance(LinesConformance):
    options: ClassVar[dict[str, Any]] = {"style": "live"}
