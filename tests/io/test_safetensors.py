"""The reader and writer against the pip `safetensors` package: dtypes, strides, failures of the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import psutil
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.disk.atomic_write import write_atomically
from flame_train.errors import ModelFileError, OutputError
from flame_train.io.safetensors import SafetensorsFile, hash_data, save_file, serialize

NUMPY_TYPES = [
    np.bool_,
    np.uint8,
    np.int8,
    np.int16,
    np.uint16,
    np.float16,
    np.int32,
    np.uint32,
    np.float32,
    np.float64,
    np.int64,
    np.uint64,
    ml_dtypes.bfloat16,
]
FP8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def filled(shape, dtype, seed=0):
    values = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 100, shape)
    return np.asarray(values).astype(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def sample():
    return {f"t.{np.dtype(t).name}": filled((3, 4), t) for t in NUMPY_TYPES} | {
        "scalar": np.array(4.6052, np.float32),
        "empty": np.zeros((0, 7), np.float32),
        "b": filled((2,), np.float32),
        "a": filled((2,), np.float32),
    }


def test_the_package_reads_what_we_write(tmp_path, sample):
    save_file(tmp_path / "x.safetensors", sample, {"zeta": "1", "alpha": "ünï"})
    theirs = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == sample.keys()
    assert all(same(theirs[name], sample[name]) for name in sample)
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as opened:
        assert opened.metadata() == {"zeta": "1", "alpha": "ünï"}
        assert opened.get_slice("scalar").get_shape() == []


def test_we_read_what_the_package_writes(tmp_path, sample):
    safetensors.numpy.save_file(sample, tmp_path / "x.safetensors", {"format": "pt"})
    with SafetensorsFile(tmp_path / "x.safetensors") as ours:
        assert set(ours.names) == set(sample)
        assert ours.metadata == {"format": "pt"}
        assert all(same(ours.read(name), sample[name]) for name in sample)
        assert (ours.info("t.bfloat16").dtype, ours.info("t.bfloat16").nbytes) == ("BF16", 24)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {'quote"\\\n\x01': "é\t\x7f☃"}])
def test_bytes_equal_the_package(tmp_path, sample, metadata):
    # one metadata key at most: with more, the package's order is random
    save_file(tmp_path / "ours", sample, metadata)
    safetensors.numpy.save_file(sample, tmp_path / "theirs", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_is_read_by_its_bits(tmp_path, dtype):
    every_bit_pattern = np.arange(256, dtype=np.uint8).view(dtype)
    save_file(tmp_path / "x.safetensors", {"w": every_bit_pattern})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.read("w").dtype == dtype
        assert file.read("w").tobytes() == bytes(range(256))
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as opened:
        assert opened.get_slice("w").get_dtype() == file.info("w").dtype


def test_equal_contents_give_equal_bytes_in_any_order(tmp_path, sample):
    metadata = {f"key{i}": str(i) for i in range(20)}
    one = b"".join(serialize(sample, metadata))
    other = b"".join(serialize(dict(reversed(sample.items())), dict(reversed(metadata.items()))))
    save_file(tmp_path / "x.safetensors", sample, metadata)
    assert one == other == (tmp_path / "x.safetensors").read_bytes()


def test_hash_data_is_over_everything_after_the_header(tmp_path, sample):
    save_file(tmp_path / "x.safetensors", sample, {"a": "b"})
    raw = (tmp_path / "x.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    assert begin % 8 == 0
    assert hash_data(sample) == hashlib.sha256(raw[begin:]).hexdigest()


def test_a_written_file_that_the_package_refuses_is_an_error(tmp_path, monkeypatch):
    """As after a disk that loses what it was given."""

    def write(place, chunks, total):
        place.write_bytes(b"".join(chunks)[:-1])

    monkeypatch.setattr("flame_train.io.safetensors.write_atomically", write)
    with pytest.raises(OutputError, match=r"x\.safetensors: was written, and the safetensors library refuses it"):
        save_file(tmp_path / "x.safetensors", {"w": np.ones(3)})


@st.composite
def strided_arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_TYPES + FP8)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    array = filled(shape, dtype, draw(st.integers(0, 99)))
    if array.ndim:
        array = array.transpose(draw(st.permutations(range(array.ndim))))
        array = array[tuple(slice(None, None, draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape)]
    if dtype.kind in "iuf" and draw(st.booleans()):
        array = array.astype(dtype.newbyteorder(">"))
    return array


@settings(max_examples=150)
@given(st.lists(strided_arrays(), max_size=4))
def test_strides_and_byte_order_keep_their_values(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("strides") / "x.safetensors"
    tensors = {str(i): array for i, array in enumerate(arrays)}
    save_file(path, tensors)
    with safetensors.safe_open(path, "np"):
        pass  # the package accepts the header
    with SafetensorsFile(path) as file:
        for name, array in tensors.items():
            expected = np.array(array.tolist()).reshape(array.shape).astype(array.dtype.newbyteorder("="))
            assert same(file.read(name), expected)


def test_read_is_a_view_that_outlives_the_file_and_cannot_be_written(tmp_path):
    save_file(tmp_path / "x.safetensors", {"w": np.arange(6.0)})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        view = file.read("w")
        assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert view.sum() == 15
    with pytest.raises(ValueError, match="closed"):
        file.read("w")


def test_an_unknown_name_is_an_error_that_names_the_file(tmp_path):
    save_file(tmp_path / "x.safetensors", {"w": np.arange(6.0)})
    with (
        SafetensorsFile(tmp_path / "x.safetensors") as file,
        pytest.raises(ModelFileError, match=r"x\.safe.*'v'"),
    ):
        file.read("v")


def test_metadata_is_capped_and_typed(tmp_path):
    with pytest.raises(OutputError, match="'ss_tag_frequency' takes 65537 bytes; at most 65536"):
        save_file(tmp_path / "x.safetensors", {}, {"ss_tag_frequency": "a" * 65537})
    with pytest.raises(TypeError, match="text to text"):
        save_file(tmp_path / "x.safetensors", {}, {"steps": 5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [object, "U3", np.longdouble, "M8[s]"])
def test_types_that_cannot_be_stored(tmp_path, dtype):
    with pytest.raises(TypeError, match="has no type for"):
        save_file(tmp_path / "x.safetensors", {"w": np.empty(2, dtype)})


class TestDisk:
    """A failure leaves the old file as it was, no temporary file, and an error that says what was needed."""

    @pytest.fixture
    def target(self, tmp_path):
        path = tmp_path / "x.safetensors"
        save_file(path, {"old": np.ones(3)})
        return path

    def check_untouched(self, target, before):
        assert target.read_bytes() == before
        assert os.listdir(target.parent) == [target.name]

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (errno.ENOSPC, "disk is full: needs 1[0-9]{2} B, has .*iB"),
            (errno.EDQUOT, "disk is full: needs 1[0-9]{2} B, has .*iB"),
            (errno.EFBIG, "a file of 1[0-9]{2} B is larger"),
            (errno.EROFS, "cannot be written"),
            (errno.EIO, "cannot be written"),
        ],
    )
    def test_failure_while_syncing(self, target, monkeypatch, code, words):
        before = target.read_bytes()

        def fail(descriptor):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match=rf"x\.safetensors: .*{words}"):
            save_file(target, {"new": np.zeros(9)})
        self.check_untouched(target, before)

    def test_file_size_limit(self, target):
        before = target.read_bytes()
        script = (
            "import resource, numpy as np\n"
            "from flame_train.errors import OutputError\n"
            "from flame_train.io.safetensors import save_file\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
            "try:\n    save_file(__import__('sys').argv[1], {'w': np.zeros(100_000)})\n"
            "except OutputError as error:\n    assert 'is larger' in str(error), error\n"
            "else:\n    raise SystemExit('was written')\n"
        )
        assert signal.SIGXFSZ  # Python ignores it, so the write fails with EFBIG
        subprocess.run([sys.executable, "-c", script, str(target)], check=True, cwd=Path(__file__).parents[2])
        self.check_untouched(target, before)

    def test_file_size_limit_met_by_small_pieces(self, target):
        """What is left in the buffer is refused once more when the file is closed: that must not be the error."""
        before = target.read_bytes()
        script = (
            "import resource, sys\n"
            "from pathlib import Path\n"
            "from flame_train.errors import OutputError\n"
            "from flame_train.disk.atomic_write import write_atomically\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
            "try:\n    write_atomically(Path(sys.argv[1]), [b'x' * 100] * 1000, 100_000)\n"
            "except OutputError as error:\n    assert 'a file of 97.7 KiB is larger' in str(error), error\n"
            "else:\n    raise SystemExit('was written')\n"
        )
        subprocess.run([sys.executable, "-c", script, str(target)], check=True, cwd=Path(__file__).parents[2])
        self.check_untouched(target, before)

    def test_too_little_space_is_seen_before_writing(self, target, monkeypatch):
        before = target.read_bytes()
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
        monkeypatch.setattr("builtins.open", lambda *a: pytest.fail("nothing may be opened"))
        with pytest.raises(OutputError, match=r"the disk is full: needs .*KiB, has 100 B"):
            save_file(target, {"w": np.zeros(1000)})
        monkeypatch.undo()
        self.check_untouched(target, before)

    def test_an_error_of_the_producer_passes_through(self, target):
        before = target.read_bytes()

        def chunks():
            yield b"12345678"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_atomically(target, chunks(), 16)
        self.check_untouched(target, before)

    def test_a_folder_is_no_target_and_a_missing_parent_is_made(self, tmp_path):
        with pytest.raises(OutputError, match="is a folder"):
            save_file(tmp_path, {})
        save_file(tmp_path / "a" / "b" / "x.safetensors", {})
        (tmp_path / "file").touch()
        with pytest.raises(OutputError, match=r"cannot be written: expected a folder, but .*file is a file"):
            save_file(tmp_path / "file" / "x.safetensors", {})
        (tmp_path / "link").symlink_to("gone")
        with pytest.raises(OutputError, match=r"expected a folder, but .*link is a link to gone, which is not there"):
            save_file(tmp_path / "link" / "x.safetensors", {})

    def test_order_data_is_synced_before_the_rename_and_the_folder_after(self, target, monkeypatch):
        calls = []
        fsync, rename = os.fsync, os.rename

        def kind_of(descriptor):
            return "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"

        monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(f"sync {kind_of(fd)}"), fsync(fd)))
        monkeypatch.setattr(os, "rename", lambda a, b, **at: (calls.append("rename"), rename(a, b, **at)))
        save_file(target, {"w": np.zeros(4)})
        assert calls == ["sync file", "rename", "sync folder"]


def test_reading_takes_no_memory_for_tensors_not_asked_for(tmp_path):
    path = tmp_path / "big.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[2000000000],"data_offsets":[0,8000000000]}}'
    with open(path, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 8_000_000_000)  # sparse: takes no disk
    process = psutil.Process()
    before = process.memory_info().rss
    with SafetensorsFile(path) as file:
        whole = file.read("w")
        assert whole[::500_000_000].sum() == 0
        assert process.memory_info().rss - before < 50e6


@pytest.mark.skipif(sys.platform != "linux", reason="counts mapped pages as Linux does")
def test_a_file_read_through_does_not_stay_in_this_process(tmp_path):
    path = tmp_path / "large.safetensors"
    tensors = {f"t{i:02}": np.full(2**20 + i, i, np.float32) for i in range(12)}  # 4 MiB and odd sizes
    save_file(path, tensors)
    mapped = lambda: psutil.Process().memory_info().shared  # noqa: E731
    before, most = mapped(), 0
    with SafetensorsFile(path) as file:
        views = {}
        for name in file.names:
            views[name] = file.read(name)
            assert views[name].sum() == tensors[name].sum()
            most = max(most, mapped() - before)
        assert most < 3 * 4 * 2**20
        for name, view in views.items():  # pages given back come again from the file
            np.testing.assert_array_equal(view, tensors[name])
