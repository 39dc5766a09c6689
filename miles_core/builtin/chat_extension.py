"""The block `{% generation %}` of chat templates, which marks what the assistant wrote.

Rendering passes it through: our masks come from how a conversation is built, not from marks. Imported by `chat` once
jinja2 is known to be there.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    tags = {"generation"}  # noqa: RUF012 - Jinja's way to name them

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
