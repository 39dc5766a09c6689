"""What the kit needs to test the built-ins that cannot stand alone: a chat template for the renderer `chat`."""

from typing import Any

from miles_core.builtin.chars import CharsTokenizer
from miles_core.testing import RendererConformance

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


class ChatConformance(RendererConformance):
    name = "chat"

    def tokenizer(self) -> Any:
        made = CharsTokenizer("0123456789>+?:abcdefghijklmnopqrstuvwxyz \n")
        made.chat_template = TEMPLATE
        return made
