"""Extension margin: how clear each sampled token's choice was, as a column."""
