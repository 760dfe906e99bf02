"""What a build did wrong, in words: whose line it was, and how a child ended.

Not covered: the words of a child that really ends so, which test_child.py has.
"""

from __future__ import annotations

import json

import pytest

from mxgate.conformance import worker
from mxgate.conformance.channel import CLOSED
from mxgate.conformance.complaint import Returned, complaint, obituary
from mxgate.kernels.build import Unavailable

CRASH = """wave 3: out of registers
Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "FIRST", line 12 in inner
  File "/home/me/mine.py", line 34 in wgrad
"""


@pytest.mark.parametrize(
    ("status", "printed", "said"),
    [
        (CLOSED, "left", "closed its channel to the runner"),
        (0, "", "ended its process with status 0 instead of answering"),
        (3, "one\n two \n\n", "ended its process with status 3 instead of answering, saying 'two'"),
        (-9, "", "killed by SIGKILL"),
        (-99, "lost", "killed by signal 99"),
        (-11, CRASH, "killed by SIGSEGV at FIRST:12, saying 'wave 3: out of registers'"),
        *(
            (-11, CRASH.replace("FIRST", file), "killed by SIGSEGV at mine.py:34, saying 'wave 3: out of registers'")
            for file in ("<frozen importlib>", str(worker.__file__), str(json.__file__))
        ),
    ],
)
def test_how_a_child_ended(status: int, printed: str, said: str) -> None:
    assert obituary(status, printed) == said


def _raised(source: str, file: str) -> BaseException:
    """What lines of a file raise, without this test's own frame in front."""
    try:
        exec(compile(source, file, "exec"), {})
    except Exception as error:
        assert error.__traceback__ is not None
        return error.with_traceback(error.__traceback__.tb_next)
    raise AssertionError("raised nothing")


def test_whose_line_raised() -> None:
    """The build's own, or a library's where it has none, and never one of ours."""
    library = "import json\njson.loads('{')"
    assert complaint(_raised(library, "/home/me/mine.py")).startswith("raised JSONDecodeError at mine.py:2: Expecting ")
    assert complaint(_raised(library, str(worker.__file__))).startswith("raised JSONDecodeError at decoder.py:")
    assert complaint(_raised("1 // 0", str(worker.__file__))).startswith("raised ZeroDivisionError: ")


def test_errors_that_say_it_themselves_and_text_that_is_none() -> None:
    assert complaint(Returned([], "a NumPy array")) == "returned a list, expected a NumPy array"
    assert complaint(Returned(1, "a pair")) == "returned an int, expected a pair"
    assert complaint(Unavailable("there is no GPU")) == "there is no GPU"
    assert complaint(ValueError("red \x1b[31m\n  text")) == "raised ValueError: red \\x1b[31m text"
    assert complaint(RuntimeError()) == "raised RuntimeError"
