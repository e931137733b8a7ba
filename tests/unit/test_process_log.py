from pathlib import Path

from tests.programs import finished

# Prints in every way there is: Python, logging, native code, a child.
PRINTS = """
import ctypes, logging, os, pathlib, subprocess, sys
from elastic_train.process_log import print_to, stderr_to

path = pathlib.Path(sys.argv[1])
def say(word):
    print(f"print {word}", flush=True)
    logging.getLogger("train").info("log %s", word)
    os.write(1, f"native out {word}\\n".encode())
    os.write(2, f"native err {word}\\n".encode())
    subprocess.run(["sh", "-c", f"echo child {word}"], check=True)
"""


def test_everything_that_a_process_prints_goes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "replica_0" / "rank_0.log"

    for word in ("first", "second"):
        done = finished(PRINTS + f"print_to(path); say({word!r})", log)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    written = log.read_text()
    for word in ("first", "second"):
        assert f"print {word}\n" in written
        assert f" I train: log {word}\n" in written
        assert f"native out {word}\nnative err {word}\nchild {word}\n" in written
    assert written.index("print first") < written.index("print second")


def test_errors_go_to_the_log_for_a_while(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "controller.log"
    program = """
with stderr_to(path):
    say("inside")
os.write(2, b"native err after\\n")
"""

    done = finished(PRINTS + program, log)

    assert done.stdout == "print inside\nnative out inside\nchild inside\n"
    assert done.stderr == "native err after\n"
    assert log.read_text().splitlines()[0].endswith(" I train: log inside")
    assert log.read_text().endswith("native err inside\n")


def test_stderr_comes_back_after_an_error(tmp_path: Path) -> None:
    done = finished(PRINTS + "with stderr_to(path): raise SystemExit('this run failed')", tmp_path / "log")

    assert (done.returncode, done.stderr) == (1, "this run failed\n")
