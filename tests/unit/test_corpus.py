import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from elastic_train.config import EnvironmentProblem
from elastic_train.replica.data import corpus
from elastic_train.replica.data.corpus import CorpusPaths, ensure_corpus, tokenizer_folder

# A small package stands for the library where its size does not matter.
PATCHED = f"""
import os, sys
from elastic_train.replica.data import corpus
corpus.sysconfig.get_path = lambda _: {os.path.join(sysconfig.get_path("stdlib"), "asyncio")!r}
write_tokenizer = corpus._write_tokenizer
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorpusPaths]:
    """The whole corpus, built once for this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_TRAIN_CACHE", str(tmp_path_factory.mktemp("corpus")))
        yield ensure_corpus()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a library that builds at once."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ELASTIC_TRAIN_CACHE", str(folder))
    monkeypatch.setattr("sysconfig.get_path", lambda _: os.path.join(os.path.dirname(os.__file__), "asyncio"))
    return folder


def start(code: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PATCHED + code],
        env={**os.environ, "ELASTIC_TRAIN_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_documents_are_the_library(built: CorpusPaths) -> None:
    import datasets

    texts = datasets.Dataset.from_file(str(built.documents))["text"]

    assert len(texts) > 500
    assert sum(map(len, texts)) > 5_000_000
    assert all(200 <= len(text) <= 16_384 for text in texts)
    assert any("class OrderedDict(dict):" in text for text in texts)


def test_tokenizer_is_one_that_torchtitan_reads(built: CorpusPaths) -> None:
    from elastic_train.replica.titan import fixes  # noqa: F401  # isort: skip
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(built.tokenizer))
    text = "def f(x):\n\treturn 'gr\u00fcn \U0001f600'  # any text, byte by byte\n"
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)

    assert tokenizer.get_vocab_size() == 2048
    assert tokens[0] == tokenizer.token_to_id("<|begin_of_text|>")
    assert tokens[-1] == tokenizer.token_to_id("<|end_of_text|>")
    assert tokenizer.decode(tokens[1:-1]) == text
    assert len(tokens) < len(text)


def test_second_call_builds_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_corpus()
    monkeypatch.setattr(corpus, "_build", lambda _: pytest.fail("built again"))

    assert ensure_corpus() == first
    assert tokenizer_folder("") == first.tokenizer


def test_named_tokenizer_needs_no_corpus(cache: Path, tmp_path: Path) -> None:
    assert tokenizer_folder(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ELASTIC_TRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert corpus.cache_folder() == tmp_path / "elastic_train"


def test_every_process_builds_the_same(tmp_path: Path) -> None:
    caches = [tmp_path / name for name in ("a", "b")]
    for process in [start("corpus.ensure_corpus()", cache) for cache in caches]:
        process.communicate()
        assert process.returncode == 0

    contents = [
        {path.relative_to(cache): path.read_bytes() for path in cache.rglob("*") if path.is_file()} for cache in caches
    ]
    assert len(contents[0]) == 4
    assert contents[0] == contents[1]


def test_processes_that_start_at_once_build_it_once(tmp_path: Path) -> None:
    code = """
def write_and_tell(*args):
    os.write(1, b"built\\n")
    write_tokenizer(*args)
corpus._write_tokenizer = write_and_tell
sys.stdin.readline()
assert corpus.ensure_corpus().tokenizer.joinpath("tokenizer_config.json").is_file()
"""
    processes = [start(code, tmp_path) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.communicate()[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * 4
    assert "".join(told) == "built\n"


def test_what_a_killed_builder_left_is_built_anew(cache: Path) -> None:
    code = """
def stay(*args):
    os.write(1, b"building\\n")
    sys.stdin.readline()
corpus._write_tokenizer = stay
corpus.ensure_corpus()
"""
    builder = start(code, cache)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert len(left) == 1

    paths = ensure_corpus()

    assert (paths.tokenizer / "tokenizer.json").is_file()
    assert {path for path in cache.iterdir() if path.is_dir()} == {paths.tokenizer.parent}


def test_failed_build_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "_write_tokenizer", fail)
    with pytest.raises(EnvironmentProblem, match=r"No space left on device.*ELASTIC_TRAIN_CACHE"):
        ensure_corpus()

    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file is in the way")

    with pytest.raises(EnvironmentProblem, match="set ELASTIC_TRAIN_CACHE to a folder"):
        ensure_corpus()


def test_python_without_sources(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "nothing"))

    with pytest.raises(EnvironmentProblem, match="comes without them"):
        ensure_corpus()


def test_builder_that_never_ends_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ensure_corpus().tokenizer.parent
    shutil.rmtree(home)
    monkeypatch.setattr(corpus, "_LOCK_TIMEOUT_S", 0.0)

    with (
        filelock.FileLock(cache / f"{home.name}.lock"),
        pytest.raises(EnvironmentProblem, match="another process has been building"),
    ):
        ensure_corpus()
