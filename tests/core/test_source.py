"""`model.source`: what it resolves to, and what is said where it names nothing."""

import os
from pathlib import Path

import pytest

from miles_core.config.schema import ModelKeys, Part
from miles_core.config.source import resolve_source
from miles_core.errors import MissingExtraError, ModelSourceError, UnknownPluginError


def hf(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def never(run, step):
    raise AssertionError("no run folder was named")


@pytest.fixture
def resolve(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugins.add(
        "acme-gguf",
        kind="model",
        names=(".gguf", "gguf:"),
        code="""
            from dataclasses import dataclass
            from pathlib import Path
            from miles_core import hookimpl
            from miles_core.provider import Provider

            @dataclass(frozen=True)
            class Config:
                pass

            class Resolver:
                def resolve(self, source, cache, deadline_s):
                    folder = Path(cache) / source.replace("/", "_")
                    folder.mkdir(parents=True)
                    if "broken" not in source:
                        (folder / "config.json").write_text("{}")
                    (folder / "tokenizer.json").write_text(source)
                    return folder

            @hookimpl
            def miles_model():
                return [Provider(name=n, config=Config, build=lambda c, x: Resolver()) for n in (".gguf", "gguf:")]
        """,
    )
    catalogue = plugins.catalogue()

    def run(run_loader=never, base=None, deadline_s=30.0, **keys):
        part = Part(kind="model", name="m", use="causal-lm", options=None, core=ModelKeys(**keys))
        return resolve_source(
            part,
            7,
            run_loader=run_loader,
            base=base,
            cache=tmp_path / "cache",
            catalogue=catalogue,
            deadline_s=deadline_s,
        )

    run.catalogue = catalogue
    return run


def refused(resolve, **keys):
    with pytest.raises(ModelSourceError) as error:
        resolve(**keys)
    assert error.value.code == "MILES-E110" and error.value.exit_code == 2
    return error.value


def test_a_hugging_face_folder(resolve, tmp_path):
    folder = hf(tmp_path / "tiny")
    source = resolve(source="./tiny")
    assert (source.asked, source.folder, source.tokenizer_folder, source.from_run) == ("./tiny", folder, folder, "")


def test_relative_paths_count_from_the_working_directory_then_from_the_run_file(resolve, tmp_path):
    beside = hf(tmp_path / "recipes" / "tiny")
    assert resolve(source="tiny", base=tmp_path / "recipes").folder == beside
    here = hf(tmp_path / "tiny")
    assert resolve(source="tiny", base=tmp_path / "recipes").folder == here


@pytest.mark.parametrize(("asked", "step"), [("runs/warmup", None), ("runs/warmup@40", 40)])
def test_a_run_folder_is_exported_by_the_injected_loader(resolve, tmp_path, asked, step):
    run = tmp_path / "runs" / "warmup"
    (run / "checkpoints").mkdir(parents=True)
    (run / "resolved.yaml").write_text("")
    calls = []

    def export(folder, step):
        calls.append((folder, step))
        return hf(tmp_path / "exported")

    source = resolve(run_loader=export, source=asked)
    assert calls == [(run, step)] and source.folder == tmp_path / "exported"
    assert source.from_run == (str(run) if step is None else f"{run}@40")


def test_a_resolver_by_suffix_and_by_scheme(resolve, tmp_path):
    (tmp_path / "model.gguf").write_text("")
    assert resolve(source="model.gguf").tokenizer_folder.joinpath("tokenizer.json").read_text() == str(
        tmp_path / "model.gguf"
    )
    assert resolve(source="gguf:owner/model").folder == tmp_path / "cache" / "gguf:owner_model"
    assert "was resolved to" in refused(resolve, source="gguf:broken").message


def test_an_architecture_with_a_built_in_tokenizer(resolve):
    source = resolve(architecture={"model_type": "qwen3"}, tokenizer="chars", alphabet="01")
    assert source.folder is None and source.tokenizer_folder is None
    assert source.architecture == {"model_type": "qwen3"}


def test_a_tokenizer_of_its_own(resolve, tmp_path):
    hf(tmp_path / "tiny")
    other = hf(tmp_path / "other")
    assert resolve(source="tiny", tokenizer="other").tokenizer_folder == other
    error = refused(resolve, source="tiny", tokenizer="nowhere")
    assert error.message == (
        "model.tokenizer 'nowhere' is neither a built-in tokenizer (chars) nor a folder with tokenizer.json"
    )


def test_a_missing_folder(resolve, tmp_path):
    error = refused(resolve, source="./tiny")
    assert error.message == f"model.source './tiny' does not exist (looked at {tmp_path / 'tiny'})"
    assert error.fix == ("name an existing Hugging Face folder or run folder; a run that was not started yet has none")


@pytest.mark.parametrize("asked", ["runs/warmup", "/absent/model", "recipes/warmup", "a/b/c", "~/model"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(resolve, tmp_path, asked):
    (tmp_path / "recipes").mkdir()
    assert "does not exist" in refused(resolve, source=asked).message


def test_a_folder_without_a_model(resolve, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("")
    assert refused(resolve, source="data").message == (
        "model.source 'data' is a folder without config.json (it holds: train.jsonl)"
    )


def test_a_folder_without_a_tokenizer(resolve, tmp_path):
    (hf(tmp_path / "tiny") / "tokenizer.json").unlink()
    error = refused(resolve, source="tiny")
    assert error.message == "model.source 'tiny' has no tokenizer.json"
    assert error.fix == "add model.tokenizer: a folder that has one"


def test_a_file_that_nothing_resolves(resolve, tmp_path):
    (tmp_path / "model.bin").write_text("")
    error = refused(resolve, source="model.bin")
    assert error.message == "model.source 'model.bin' is a file; suffixes that installed plugins resolve: .gguf"


@pytest.mark.parametrize("source", ["model.gguf", "gguf:some_package"])
def test_a_kind_of_source_that_a_plugin_of_ours_would_resolve(plugins, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_text("")
    part = Part(kind="model", name="m", use="causal-lm", options=None, core=ModelKeys(source=source))
    with pytest.raises(UnknownPluginError) as caught:
        resolve_source(part, 0, run_loader=never, catalogue=plugins.catalogue())
    assert caught.value.fix == "pip install miles-model-gguf"


def hub(tmp_path, monkeypatch, body):
    """A stand-in for huggingface_hub, seen by child processes."""
    package = tmp_path / "hub"
    package.mkdir()
    (package / "huggingface_hub.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(package), prepend=os.pathsep)


def test_a_hub_id_is_fetched_without_pickles(resolve, tmp_path, monkeypatch):
    folder = hf(tmp_path / "snapshot")
    hub(
        tmp_path,
        monkeypatch,
        f"def snapshot_download(name, allow_patterns):\n    assert name == 'owner/model'\n"
        f"    assert '*.bin' not in allow_patterns\n    print('noise')\n    return {str(folder)!r}\n",
    )
    assert resolve(source="owner/model").folder == folder


def test_the_hub_refuses(resolve, tmp_path, monkeypatch):
    hub(tmp_path, monkeypatch, "def snapshot_download(name, allow_patterns):\n    raise OSError('offline')\n")
    error = refused(resolve, source="owner/model")
    assert error.message == "model.source 'owner/model' is no local folder, and the hub refused it: OSError: offline"


def test_the_hub_never_answers(resolve, tmp_path, monkeypatch):
    hub(tmp_path, monkeypatch, "import time\ndef snapshot_download(name, allow_patterns):\n    time.sleep(600)\n")
    error = refused(resolve, source="owner/model", deadline_s=0.5)
    assert "did not deliver it within 0.5 s" in error.message


def test_the_hub_library_is_not_installed(resolve, tmp_path, monkeypatch):
    hub(tmp_path, monkeypatch, "raise ModuleNotFoundError(\"No module named 'huggingface_hub'\")")
    with pytest.raises(MissingExtraError) as error:
        resolve(source="owner/model")
    assert error.value.fix == "pip install huggingface_hub, or name a local folder"


def test_the_cache_is_given_to_resolvers_as_a_path(resolve, tmp_path):
    assert isinstance(resolve(source="gguf:y").folder, Path)
