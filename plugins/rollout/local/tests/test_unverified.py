"""Architectures that nobody verified run through their own forward when asked to."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from local_engine_kit import COMMON, RENDERER, model_of, plain_logprobs, ragged, request, run, started

from miles_core.contracts.model import ModelSource
from miles_core.errors import ModelSourceError
from miles_core.provider import BuildContext, Place
from miles_rollout_local.config import LocalConfig
from miles_rollout_local.plugin import miles_rollout

OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": dict(model_type="gpt2", vocab_size=45, n_positions=96, n_embd=64, n_layer=2, n_head=4, bos_token_id=None),
    "olmo2": dict(model_type="olmo2", **COMMON),
    "granite": dict(model_type="granite", **COMMON),
}


@pytest.mark.parametrize("name", sorted(OTHERS))
@pytest.mark.parametrize("invariant", [False, True])
def test_logprobs_equal_a_plain_forward(name: str, invariant: bool) -> None:
    architecture = OTHERS[name]
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture, slots=4, unverified=True, batch_invariant=invariant)
        prompts = ragged(9)
        jobs = [engine.generate(request(f"r{i}", p, seed=i, max_new_tokens=5 + 4 * i)) for i, p in enumerate(prompts)]
        for prompt, done in zip(prompts, await asyncio.gather(*jobs), strict=True):
            plain = plain_logprobs(model, prompt, done.columns["tokens"])
            np.testing.assert_allclose(done.columns["logprobs"], plain, rtol=0, atol=1e-5)
        await engine.close()

    run(go())


def test_a_folder_is_read_without_its_weights(tmp_path: Any) -> None:
    model_of(OTHERS["olmo2"]).config.save_pretrained(tmp_path)

    def build(**options: Any) -> Any:
        context = BuildContext(
            place=Place.CONTROLLER,
            name="local",
            run=None,  # type: ignore[arg-type]
            model=ModelSource(asked=str(tmp_path), folder=tmp_path),
            renderer=RENDERER,
        )
        return miles_rollout().build(LocalConfig(**options), context)

    with pytest.raises(ModelSourceError, match="never verified with architecture 'olmo2'"):
        build()
    assert build(unverified=True).slots.max_length == 96
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelSourceError, match="no configuration that transformers can read"):
        build()


def test_state_that_is_no_cache_of_keys_and_values_is_refused() -> None:
    mamba = dict(model_type="mamba", vocab_size=45, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelSourceError, match="states no longest length"):
        from local_engine_kit import build

        build(mamba, unverified=True)
