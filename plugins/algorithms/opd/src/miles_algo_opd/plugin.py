"""What this distribution offers: presets `opd`, `opd_topk`; stage `opd`; term `topk_kl`; scorer `http-teacher`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_algo_opd import config as c
from miles_algo_opd import presets
from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider

if TYPE_CHECKING:
    from miles_core.config.schema import Policy


def _policy(context: BuildContext | None) -> Policy | None:
    return None if context is None else context.run.policies.get(context.policy)


def _opd(config: c.OpdConfig, context: BuildContext | None) -> Any:
    from miles_algo_opd.stage import Opd

    policy = _policy(context)
    return Opd(config, mixes=policy is None or policy.algorithm.one("advantage") is not None)


def _topk_kl(config: c.TopkKlConfig, context: BuildContext | None) -> Any:
    from miles_algo_opd.term import ROLE, TopkKl

    policy = _policy(context)
    role = None if policy is None else policy.roles.get(ROLE)
    return TopkKl(config, chosen_by_scorer=role is not None and bool(role.held_by))


def _topk_needs(config: c.TopkKlConfig) -> set[str]:
    """Ids that the student chooses can be scored by a model of the backend only."""
    return {"role:teacher"} | (set() if config.support is c.Support.teacher else {"scores_at_ids:teacher"})


def _http_teacher(config: c.HttpTeacherConfig, context: BuildContext) -> Any:
    from miles_algo_opd.http_teacher import http_teacher

    return http_teacher(config, context)


@hookimpl
def miles_algorithm() -> list[Provider[Any, dict[str, Any]]]:
    return [
        Provider(
            name="opd",
            config=c.OpdPreset,
            build=lambda config, context: presets.opd(),
            summary="on-policy distillation per sampled token, through the advantage",
            explain=presets.OPD_EXPLAIN,
        ),
        Provider(
            name="opd_topk",
            config=c.OpdTopkPreset,
            build=lambda config, context: presets.opd_topk(),
            summary="on-policy distillation over top-k sets, as a loss",
            explain=presets.OPD_TOPK_EXPLAIN,
        ),
    ]


@hookimpl
def miles_stage() -> Provider[c.OpdConfig, Any]:
    return Provider(
        name="opd",
        config=c.OpdConfig,
        build=_opd,
        requires=("role:teacher", "behaviour_logprobs"),
        field="distill",
        summary="A − λ(π_p − π_T) on sampled tokens",
        explain=(
            "A_t ← A_t − coef·(π_p − π_T)_t, before whitening; A_t is 0 where the run has no advantage stage\n"
            'Lu and Thinking Machines Lab, "On-Policy Distillation" (2025)\n'
            "Deviations: none; teacher and student are tempered and cut alike."
        ),
    )


@hookimpl
def miles_term() -> Provider[c.TopkKlConfig, Any]:
    return Provider(
        name="topk_kl",
        config=c.TopkKlConfig,
        build=_topk_kl,
        requires=_topk_needs,
        field="distill",
        summary="KL between student and teacher over top-k sets, with its own gradient",
        explain=(
            "reverse Σ p (log p − log t), forward Σ t (log t − log p), over the k most likely tokens of `support`;\n"
            "tail bucket: the rest as one outcome; renormalise: conditioned on the set; none: left out\n"
            "GKD, Agarwal et al., arXiv 2306.13649\n"
            "Deviations: a set of tokens instead of the vocabulary; the student's set is that of the proximal pass."
        ),
    )


@hookimpl
def miles_scorer() -> Provider[c.HttpTeacherConfig, Any]:
    return Provider(
        name="http-teacher",
        config=c.HttpTeacherConfig,
        build=_http_teacher,
        summary="teachers behind HTTP (SGLang, vLLM), routed by task; token ids in, log-probabilities out",
    )
