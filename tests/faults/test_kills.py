"""Real processes are killed with SIGKILL: each run must end with the weights of the run that was left alone.

In CI a few kills; in full, 20 on each model:

    FASHION_OCT_KILLS=20 python -m pytest -m slow tests/faults
"""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
import whole_runs

NUM_KILLS = int(os.environ.get("FASHION_OCT_KILLS", "3"))

# A process that kills itself in the middle of its n-th write of a file, or of a row of a cache.
DEADLY = """
import os, signal, sys
from fashion_oct import files, row_cache, train

number = int(os.environ["KILL_AT_WRITE"])
def deadly(function):
    def call(*arguments):
        global number
        number -= 1
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
if os.environ["KILL_IN"] == "files":
    files.os.fsync = deadly(os.fsync)  # everything is written, nothing is renamed
else:
    row_cache.os.pwrite = deadly(os.pwrite)  # rows of the batch are written, no checksum
train.main()
"""

pytestmark = pytest.mark.slow


KINDS = {"moment": "at a random moment", "files": "while a file is written", "rows": "while the cache is written"}


def start_to_be_killed(place, workdir, flags, *, rng, seconds):
    """Returns a run that is killed at some place; it may be done before."""
    if place != "moment":
        environment = {"KILL_IN": place, "KILL_AT_WRITE": str(rng.randint(1, 6))}
        return whole_runs.start(workdir, flags, program=("-c", DEADLY), environment=environment)
    process = whole_runs.start(workdir, flags)
    try:
        process.communicate(timeout=rng.uniform(0.3, 1.0) * seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    return process


@pytest.mark.parametrize(("model", "num_places"), [("convnet", 2), ("vgg16", 3)])
def test_runs_that_are_killed_end_with_the_same_bits(trying, model, num_places, tmp_path):
    flags = {"convnet": whole_runs.convnet_flags, "vgg16": whole_runs.vgg16_flags}[model](tmp_path)
    begin = time.monotonic()
    whole_runs.finish(whole_runs.start(tmp_path / "reference", flags))
    seconds, expected = time.monotonic() - begin, whole_runs.result_of(tmp_path / "reference")
    rng, num_kills, num_runs = random.Random(0), 0, 0
    while num_kills < NUM_KILLS:
        workdir, places = tmp_path / f"run{num_runs}", []
        num_runs += 1
        for _ in range(min(4, NUM_KILLS - num_kills)):  # kills of one run
            place = list(KINDS)[num_kills % num_places]
            process = start_to_be_killed(place, workdir, flags, rng=rng, seconds=seconds)
            process.communicate(timeout=300)
            if process.returncode == 0:  # it was done before it was killed
                break
            assert process.returncode == -signal.SIGKILL
            num_kills += 1
            places.append(place)
        with contextlib.ExitStack() as stack:
            for place in places:
                stack.enter_context(trying(f"{model}: kill -9 {KINDS[place]}"))
            whole_runs.finish(whole_runs.start(workdir, flags))
            assert whole_runs.result_of(workdir) == expected
