"""Toy plugins of every kind and place: numpy only, small enough to check by hand, and real: they learn.

Registered by the distribution `miles-testing-toys` (tests/toys). A toy is chosen like any plugin: `use: toy`.
"""

from __future__ import annotations

from typing import Any

from miles_core import hookimpl
from miles_core.provider import BuildContext, Place, Provider
from miles_core.testing.toys import config as c

ENGINE_OFFERS = (
    "weights.tensors",
    "weights.checkpoint",
    "logprobs",
    "keep_ids",
    "pause.in_place",
    "pause.recompute",
    "pause.abort",
    "pause.finish",
    "batch_invariant",
    "policies",
    "toy.previous",
)


def _engine(config: c.EngineConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.engine import ToyEngine

    return ToyEngine(
        context.name,
        renderer=context.renderer,
        step_s=config.step_s,
        slots=config.slots,
    )


def _socket_engine(config: c.SocketEngineConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.socket_engine import EngineServer, SocketEngine, serve_command

    server, command = None, []
    if context.place == Place.CONTROLLER and config.own_process:
        stop_ids = (1,) if context.renderer is None else context.renderer.stop_ids
        command = serve_command(context.name, config.step_s, config.slots, stop_ids)
    elif context.place == Place.CONTROLLER:
        server = EngineServer(_engine(config, context))
    return SocketEngine(
        context.name,
        address=context.address,
        port=config.port,
        server=server,
        command=command,
        connect_s=config.connect_s,
    )


@hookimpl
def miles_rollout() -> list[Provider[Any, Any]]:
    return [
        Provider(name="toy", config=c.EngineConfig, build=_engine, offers=ENGINE_OFFERS, summary="table models"),
        Provider(
            name="toy-socket",
            config=c.SocketEngineConfig,
            build=_socket_engine,
            offers=ENGINE_OFFERS,
            summary="table models behind a TCP port on 127.0.0.1",
        ),
    ]


def _backend(config: c.BackendConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.backend import ToyBackend

    return ToyBackend(rank=context.rank, extensions=context.extensions, micro_groups=config.micro_groups)


@hookimpl
def miles_backend() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.BackendConfig, build=_backend, summary="trains table models with NumPy")


def _sync(config: c.SyncConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys import sync

    if context.place == Place.CONTROLLER:
        return sync.ToyTransport(config.phase.value, "one process")
    if context.place == Place.TRAINER:
        return sync.ToySender(context.need("export"), rank=context.rank, bucket_bytes=config.bucket_bytes)
    return sync.ToyLink(context.need("engine"))


def _sync_socket(config: c.SyncConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys import sync, sync_socket

    if context.place == Place.CONTROLLER:
        return sync.ToyTransport(config.phase.value, "TCP on 127.0.0.1")
    if context.place == Place.TRAINER:
        return sync_socket.SocketSender(context.need("export"), rank=context.rank, bucket_bytes=config.bucket_bytes)
    return sync_socket.SocketLink(context.need("engine"))


@hookimpl
def miles_sync() -> list[Provider[Any, Any]]:
    return [
        Provider(
            name="toy",
            config=c.SyncConfig,
            build=_sync,
            requires=("weights.tensors", "in_process"),
            summary="hands NumPy arrays over in one process",
        ),
        Provider(
            name="toy-socket",
            config=c.SyncConfig,
            build=_sync_socket,
            requires=("weights.tensors",),
            summary="hands NumPy arrays over by TCP on 127.0.0.1",
        ),
    ]


def _env(config: c.EnvConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.envs import EchoEnvironment

    return EchoEnvironment(context.name, config)


def _env_multiturn(config: c.EnvConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.envs import MultiTurnEchoEnvironment

    return MultiTurnEchoEnvironment(context.name, config)


@hookimpl
def miles_env() -> list[Provider[Any, Any]]:
    return [
        Provider(name="toy", config=c.EnvConfig, build=_env, summary="echo the last digit"),
        Provider(
            name="toy-multiturn", config=c.EnvConfig, build=_env_multiturn, summary="echo it again, turn after turn"
        ),
    ]


def _threads(config: c.LauncherConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.launcher import ThreadWorkers, ToyLauncher

    return ToyLauncher(ThreadWorkers, config.start_s)


def _processes(config: c.LauncherConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.launcher import ProcessWorkers, ToyLauncher

    return ToyLauncher(ProcessWorkers, config.start_s)


@hookimpl
def miles_launcher() -> list[Provider[Any, Any]]:
    return [
        Provider(
            name="toy",
            config=c.LauncherConfig,
            build=_threads,
            offers=("in_process",),
            summary="workers on threads",
        ),
        Provider(
            name="toy-processes", config=c.LauncherConfig, build=_processes, summary="workers in processes of their own"
        ),
    ]


def _tracker(config: c.NoConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.tracker import ToyTracker

    return ToyTracker(context.run_dir)


@hookimpl
def miles_tracker() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.NoConfig, build=_tracker, summary="keeps what it is told")


def _preset(config: c.NoConfig, context: BuildContext | None) -> dict[str, Any]:
    return {"advantage": {"use": "toy"}, "loss": {"use": "toy"}, "aggregation": "token_mean"}


def _preset_sft(config: c.NoConfig, context: BuildContext | None) -> dict[str, Any]:
    return {"episodes": "demonstrations", "loss": {"use": "toy-sft"}, "aggregation": "token_mean"}


def _preset_everything(config: c.NoConfig, context: BuildContext | None) -> dict[str, Any]:
    return {
        "penalties": {"toy-penalty": {"coef": 0.01}},
        "advantage": {"use": "toy"},
        "whiten": {"use": "toy-whiten"},
        "corrections": {"toy-correction": {}, "toy-weight": {}},
        "loss": {"use": "toy"},
        "kl": {"use": "toy-kl", "coef": 0.01},
        "entropy": {"use": "toy-entropy", "coef": 0.01},
        "filters": {"toy": {}},
        "aggregation": "episode_mean",
    }


@hookimpl
def miles_algorithm() -> list[Provider[Any, Any]]:
    return [
        Provider(name="toy", config=c.NoConfig, build=_preset, summary="centred advantage, clipped ratio"),
        Provider(name="toy-sft", config=c.NoConfig, build=_preset_sft, summary="learn demonstrations"),
        Provider(
            name="toy-everything",
            config=c.NoConfig,
            build=_preset_everything,
            summary="every field but distill and value; needs a reference role",
        ),
    ]


def _stage(name: str) -> Any:
    def build(config: c.StageConfig, context: BuildContext) -> Any:
        from miles_core.testing.toys import parts

        return getattr(parts, name)(config)

    return build


STAGES = {
    "toy": ("advantage", "CentredAdvantage"),
    "toy-kl-advantage": ("advantage", "PenalisedAdvantage"),
    "toy-penalty": ("penalty", "LengthPenalty"),
    "toy-reward-kl": ("reward_kl", "RewardKL"),
    "toy-distill": ("distill", "Distill"),
    "toy-whiten": ("whiten", "Whiten"),
    "toy-correction": ("correction", "Correction"),
}
TERMS = {
    "toy": ("loss", "Policy"),
    "toy-sft": ("loss", "Supervised"),
    "toy-sequence": ("loss", "Sequence"),
    "toy-kl": ("kl", "ReferenceKL"),
    "toy-entropy": ("entropy", "Entropy"),
    "toy-value": ("value", "Value"),
    "toy-weight": ("correction", "Weight"),
}


@hookimpl
def miles_stage() -> list[Provider[Any, Any]]:
    return [
        Provider(
            name=name,
            config=c.StageConfig,
            build=_stage(cls),
            field=field,
            requires=("siblings",) if field == "advantage" else (),
            summary=f"toy {field}",
        )
        for name, (field, cls) in STAGES.items()
    ]


@hookimpl
def miles_term() -> list[Provider[Any, Any]]:
    return [
        Provider(name=name, config=c.TermConfig, build=_stage(cls), field=field, summary=f"toy {field}")
        for name, (field, cls) in TERMS.items()
    ]


def _filter(config: c.FilterConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.parts import SpreadFilter

    return SpreadFilter(config.minimum)


@hookimpl
def miles_filter() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.FilterConfig, build=_filter, summary="rejects groups without spread")


def _scorer(config: c.ScorerConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.scorer import UniformScorer

    return UniformScorer(config.vocab_size)


@hookimpl
def miles_scorer() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.ScorerConfig, build=_scorer, summary="every token equally likely")


def _model(config: c.ModelConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.adapter import ToyAdapter

    return ToyAdapter(config.vocab_size, config.order, config.scale)


def _resolver(config: c.NoConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.adapter import ToyResolver

    return ToyResolver()


@hookimpl
def miles_model() -> list[Provider[Any, Any]]:
    return [
        Provider(name="toy", config=c.ModelConfig, build=_model, summary="a sum of tables over the last tokens"),
        Provider(name=".toy", config=c.NoConfig, build=_resolver, summary="resolves *.toy files"),
    ]


def _tokenizer(config: c.TokenizerConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.rendering import ToyTokenizer

    alphabet = getattr(context.core, "alphabet", None)
    return ToyTokenizer(c.ALPHABET if alphabet is None else alphabet)


@hookimpl
def miles_tokenizer() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.TokenizerConfig, build=_tokenizer, summary="one id a character")


def _renderer(config: c.NoConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer

    return ToyRenderer(ToyTokenizer() if context.tokenizer is None else context.tokenizer)


@hookimpl
def miles_renderer() -> Provider[Any, Any]:
    return Provider(name="toy", config=c.NoConfig, build=_renderer, summary="contents one after another")


def _extension(config: c.ExtensionConfig, context: BuildContext) -> Any:
    from miles_core.testing.toys.extension import ToyExtension

    return ToyExtension(config)


@hookimpl
def miles_extension() -> Provider[Any, Any]:
    return Provider(
        name="toy",
        config=c.ExtensionConfig,
        build=_extension,
        requires=lambda config: ("toy.previous",) if config.replay else (),
        summary="replay and LoRA in miniature",
    )
