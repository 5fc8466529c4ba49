# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Python package share."""

import os
import signal
import subprocess
import sys

import pytest

# Whoever started the tests in the background had them ignore Ctrl-C, and processes inherit that; the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run_python():
    """Runs a script in a process of its own and gives back what it printed; it must end well, and on its own."""

    def run(script, *arguments, status=0, **environment):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def session():
    """A handle of the C ABI: a session that was just opened."""
    import abi  # loads the library, which tests that need none should not wait for

    status, handle = abi.open_session()
    assert status == abi.OK, abi.last_error()
    yield handle
    abi.lib.mjl_session_close(handle)
