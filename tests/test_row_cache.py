"""Rows are computed once, survive kills and damage, and are shared by processes."""

import gc
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from fashion_oct import row_cache

NUM_ROWS = 20
EVERY = np.arange(NUM_ROWS)
ROWS = np.arange(1, 1 + NUM_ROWS * 6, dtype=np.uint16).reshape(NUM_ROWS, 2, 3)  # 12 bytes a row, none of them zeros

# what the other processes of these tests begin with
PRELUDE = """
import os, pathlib, signal, sys, time
import numpy as np
from fashion_oct import row_cache
folder = pathlib.Path(sys.argv[1])
ROWS = np.arange(1, 121, dtype=np.uint16).reshape(20, 2, 3)
cache = row_cache.RowCache(folder, 20, (2, 3), np.uint16)
def say(*words):
    print(*words, flush=True)
"""


def open_cache(folder):
    return row_cache.RowCache(folder, NUM_ROWS, (2, 3), np.uint16)


def fill(cache, rows_at_once=3, limit=NUM_ROWS):
    """Fills up to `limit` rows; returns the numbers of those that were computed."""
    computed = []
    with cache.filling():
        while len(cache.missing) and len(computed) < limit:
            indices = cache.missing[:rows_at_once]
            cache.write(indices, ROWS[indices])
            computed += indices.tolist()
    return computed


def start(code, folder):
    command = [sys.executable, "-c", PRELUDE + code, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[1])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches" / "one"


@pytest.fixture
def filled(folder):
    cache = open_cache(folder)
    fill(cache)
    cache.close()
    return folder


def test_row_cache_gives_back_what_was_written(filled):
    cache = open_cache(filled)
    np.testing.assert_array_equal(cache[EVERY], ROWS)
    assert cache[[3]].dtype == np.uint16
    np.testing.assert_array_equal(cache[np.array([7, 2])], ROWS[[7, 2]])


def test_row_cache_computes_each_row_once(folder):
    assert fill(open_cache(folder)) == list(range(NUM_ROWS))
    assert fill(open_cache(folder)) == []


def test_row_cache_names_the_rows_that_are_missing(folder):
    cache = open_cache(folder)
    fill(cache, limit=5)  # 3 + 3
    assert cache.missing.tolist() == open_cache(folder).missing.tolist() == list(range(6, NUM_ROWS))


def test_row_cache_keeps_a_row_whose_crc_is_zero(tmp_path):
    row = np.frombuffer(b"\x9d\x0a\xd9\x6d", np.uint8)
    assert zlib.crc32(row) == 0
    cache = row_cache.RowCache(tmp_path / "one", 1, (4,), np.uint8)
    cache.write(np.array([0]), row[None])
    assert len(row_cache.RowCache(tmp_path / "one", 1, (4,), np.uint8).missing) == 0


def test_filling_goes_on_after_a_kill(folder):
    code = """
with cache.filling():
    for i in range(20):
        cache.write(np.array([i]), ROWS[[i]])
        say(i)
        time.sleep(0.02)
"""
    process = start(code, folder)
    for line in process.stdout:
        if line.strip() == "6":
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    cache = open_cache(folder)
    assert 0 < len(cache.missing) <= 13  # at least the rows 0 to 6 are there
    missing = cache.missing.tolist()
    assert fill(cache) == missing
    np.testing.assert_array_equal(open_cache(folder)[EVERY], ROWS)


def test_filling_computes_a_row_again_that_was_written_in_part(folder):
    code = """
cache.write(np.array([0]), ROWS[[0]])
with open(folder / "rows.bin", "r+b") as stream:  # half of row 1, its checksum was still to come
    stream.seek(12)
    stream.write(bytes([7] * 6))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert start(code, folder).wait() == -signal.SIGKILL
    assert open_cache(folder).missing.tolist() == list(range(1, NUM_ROWS))


FILL_SLOWLY = """
count = 0
say("opened")
with cache.filling():
    while len(cache.missing):
        cache.write(cache.missing[:1], ROWS[cache.missing[:1]])
        count += 1
        say("wrote")
        time.sleep(0.02)
say(count, (cache[np.arange(20)] == ROWS).all())
"""


def test_filling_happens_once_in_two_processes(folder):
    first = start(FILL_SLOWLY, folder)
    assert first.stdout.readline() == "opened\n"
    assert first.stdout.readline() == "wrote\n"
    second = start(FILL_SLOWLY, folder)
    outputs = [process.communicate(timeout=30)[0].splitlines() for process in (first, second)]
    assert outputs[0][-1] == "20 True"
    assert outputs[1] == ["opened", "0 True"]


def test_filling_is_taken_over_from_a_process_that_is_killed(folder):
    first = start(FILL_SLOWLY.replace("0.02", "60"), folder)
    assert [first.stdout.readline() for _ in range(2)] == ["opened\n", "wrote\n"]
    second = start(FILL_SLOWLY.replace("0.02", "0"), folder)
    assert second.stdout.readline() == "opened\n"
    time.sleep(0.2)  # long enough to fill, if it did not wait
    first.kill()
    first.wait()
    assert second.communicate(timeout=30)[0].splitlines()[-1] == "19 True"


def test_filling_takes_over_what_was_filled_since_the_cache_was_opened(folder):
    early = open_cache(folder)
    fill(open_cache(folder))
    assert fill(early) == []
    np.testing.assert_array_equal(early[EVERY], ROWS)


def flip_a_byte_of_row_4(folder):
    data = bytearray((folder / "rows.bin").read_bytes())
    data[4 * 12 + 7] ^= 1
    (folder / "rows.bin").write_bytes(data)


def cut_in_row_15(folder):
    os.truncate(folder / "rows.bin", 15 * 12 + 5)


def flip_a_byte_of_checksum_2(folder):
    data = bytearray((folder / "checksums.bin").read_bytes())
    data[2 * 8] ^= 1
    (folder / "checksums.bin").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "hit"),
    [(flip_a_byte_of_row_4, [4]), (cut_in_row_15, [15, 16, 17, 18, 19]), (flip_a_byte_of_checksum_2, [2])],
)
def test_row_cache_computes_damaged_rows_again_and_only_those(filled, damage, hit, caplog):
    damage(filled)
    cache = open_cache(filled)
    assert fill(cache) == hit
    np.testing.assert_array_equal(open_cache(filled)[EVERY], ROWS)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"{len(hit)} rows of {filled} are damaged; they are computed again"]


@pytest.mark.parametrize(("num_bytes", "hit"), [(0, range(20)), (3 * 8 + 4, range(3, 20))])
def test_row_cache_trusts_no_row_without_its_checksum(filled, num_bytes, hit):
    path = filled / "checksums.bin"
    path.write_bytes(path.read_bytes()[:num_bytes] + bytes(NUM_ROWS * 8 - num_bytes))
    assert open_cache(filled).missing.tolist() == list(hit)
    os.truncate(path, num_bytes)
    assert open_cache(filled).missing.tolist() == list(hit)


def test_row_cache_cuts_files_that_are_too_long(filled):
    for name in ("rows.bin", "checksums.bin"):
        with open(filled / name, "ab") as stream:
            stream.write(b"x" * 100)
    cache = open_cache(filled)
    assert len(cache.missing) == 0
    np.testing.assert_array_equal(cache[EVERY], ROWS)
    assert [(filled / name).stat().st_size for name in ("rows.bin", "checksums.bin")] == [20 * 12, 20 * 8]


@pytest.fixture
def small_files_only():
    """No file of this process may grow beyond 1 MB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_row_cache_without_room_leaves_nothing(folder, small_files_only):
    with pytest.raises(OSError, match=r"1,000,008 bytes are needed.*rows\.bin"):
        row_cache.RowCache(folder, 125_001, (8,), np.uint8)
    assert not folder.exists()


def test_row_cache_without_room_for_a_lost_part_keeps_the_rest(folder, small_files_only):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    cache = row_cache.RowCache(folder, 3, (500_000,), np.uint8)
    cache.write(cache.missing, np.ones((3, 500_000), np.uint8))
    cache.close()
    os.truncate(folder / "rows.bin", 900_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(OSError, match="bytes are needed"):
        row_cache.RowCache(folder, 3, (500_000,), np.uint8)
    assert (folder / "rows.bin").stat().st_size == 900_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert row_cache.RowCache(folder, 3, (500_000,), np.uint8).missing.tolist() == [1, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_row_cache_on_a_full_disk_leaves_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        with pytest.raises(OSError, match="No space left on device"):
            row_cache.RowCache(disk / "one", 2, (1_000_000,), np.uint8)
        assert os.listdir(disk) == ["lock"]
        cache = row_cache.RowCache(disk / "one", 2, (100_000,), np.uint8)
        cache.write(cache.missing, np.ones((2, 100_000), np.uint8))
        del cache
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_row_cache_in_a_folder_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        open_cache(tmp_path / "file" / "one")


def test_exists_looks_and_makes_nothing(folder):
    assert not row_cache.exists(folder)
    assert not folder.exists()
    cache = open_cache(folder)
    assert not row_cache.exists(folder)
    fill(cache, limit=1)
    assert row_cache.exists(folder)


def test_row_cache_reads_no_row_before_it_is_asked_for(filled):
    flip_a_byte_of_row_4(filled)
    cache = open_cache(filled)
    assert cache.has_rows(EVERY).all()
    assert cache.find_missing(np.array([3, 5])).tolist() == []
    assert cache.find_missing(np.array([5, 4, 3])).tolist() == [4]
    assert cache.has_rows(np.array([3, 4])).tolist() == [True, False]


def test_row_cache_whose_file_is_cut_while_it_is_used_is_an_os_error(filled):
    cache = open_cache(filled)
    os.truncate(filled / "rows.bin", 15 * 12 + 5)
    np.testing.assert_array_equal(cache[np.array([14])], ROWS[[14]])
    with pytest.raises(OSError, match="has become shorter"):
        cache[np.array([14, 15])]


@pytest.fixture
def three(tmp_path):
    """Three caches of 240 bytes, used in the order b, a, c, the last time long ago."""
    parent = tmp_path / "caches"
    for seconds, name in [(2, "a"), (1, "b"), (3, "c")]:
        cache = open_cache(parent / name)
        fill(cache)
        cache.close()
        os.utime(parent / name, (seconds, seconds))
    (parent / "mine").mkdir()
    (parent / "mine" / "photo.jpeg").write_bytes(b"x" * 1000)
    return parent


@pytest.mark.parametrize(("limit_bytes", "removed"), [(720, []), (719, ["b"]), (300, ["b", "a"]), (0, ["b", "a", "c"])])
def test_evict_removes_the_longest_unused(three, limit_bytes, removed):
    assert row_cache.evict(three, limit_bytes=limit_bytes) == removed
    assert {path.name for path in three.iterdir()} == {"a", "b", "c", "mine", "lock"} - set(removed)


def test_evict_sees_opening_as_a_use(three):
    open_cache(three / "b").close()
    assert row_cache.evict(three, limit_bytes=500) == ["a"]


def test_evict_leaves_what_another_process_uses(three):
    process = start("say('opened'); time.sleep(60)", three / "b")
    assert process.stdout.readline() == "opened\n"
    os.utime(three / "b", (1, 1))
    assert row_cache.evict(three, limit_bytes=0) == ["a", "c"]
    process.kill()
    process.wait()
    assert row_cache.evict(three, limit_bytes=0) == ["b"]


def test_evict_leaves_what_this_process_uses(three):
    cache = open_cache(three / "b")
    assert "b" not in row_cache.evict(three, limit_bytes=0)
    del cache
    gc.collect()
    assert row_cache.evict(three, limit_bytes=0) == ["b"]


def test_evict_makes_nothing_where_there_is_no_cache(tmp_path):
    assert row_cache.evict(tmp_path / "none", limit_bytes=0) == []
    assert not (tmp_path / "none").exists()


def test_evict_never_breaks_a_cache_that_is_being_opened(folder):
    process = start("cache.close(); say('go')\nwhile True: row_cache.evict(folder.parent, limit_bytes=0)", folder)
    assert process.stdout.readline() == "go\n"
    num_new = 0
    for _ in range(200):
        cache = open_cache(folder)
        num_new += len(cache.missing) == NUM_ROWS
        fill(cache)
        np.testing.assert_array_equal(cache[EVERY], ROWS)
        assert (folder / "rows.bin").exists()
        cache.close()
    process.kill()
    process.wait()
    assert num_new > 1  # the other process has removed it now and then


def test_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FASHION_OCT_CACHE", raising=False)
    assert row_cache.default_folder() == tmp_path / ".cache" / "fashion_oct"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert row_cache.default_folder() == tmp_path / "xdg" / "fashion_oct"
    monkeypatch.setenv("FASHION_OCT_CACHE", str(tmp_path / "mine"))
    assert row_cache.default_folder() == tmp_path / "mine"
