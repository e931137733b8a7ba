import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.config import RunConfig, load_config, reference
from elastic_train.config.keys import keys

ROOT = Path(__file__).parents[2]


def test_the_reference_is_what_the_schema_says():
    done = subprocess.run(
        [sys.executable, "-m", "elastic_train.config.reference", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_reference_file_is_the_default_config():
    loaded = load_config(ROOT / "configs" / "reference.toml", {}, {})
    assert loaded.config == RunConfig()
    assert loaded.notes == ()


def test_both_show_every_key():
    file, page = reference.toml_reference(), reference.page()
    for key in keys().values():
        assert f"\n{key.field} = " in file or f"\n#{key.field} =" in file
        assert f"| `{key.field}` |" in page


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    return tmp_path


def test_writing_makes_the_check_pass(root):
    assert reference.main([]) is None
    assert reference.main(["--check"]) is None


def test_stale_files_are_named(root):
    reference.main([])
    (root / "docs" / "configuration.md").write_text("old")
    (root / "configs" / "reference.toml").unlink()
    problem = reference.main(["--check"])
    assert problem is not None
    assert "configs/reference.toml, docs/configuration.md" in problem


def test_other_arguments_are_refused(root):
    assert reference.main(["--chekc"]) is not None
    assert list(root.iterdir()) == []
