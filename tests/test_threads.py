import pytest

from tfmixed import _probe
from tfmixed.threads import Threads
from tfmixed.threads import recommend

HOW = (
    "Start with TF_NUM_INTRAOP_THREADS={0} python train.py, or call "
    "tf.config.threading.set_intra_op_parallelism_threads({0}) before the "
    "first operation."
)


@pytest.mark.parametrize(
    ("facts", "variables"),
    [
        (Threads(2, 2, None), {}),
        (Threads(2, 1, None), {}),
        (Threads(8, 8, 8.0), {}),
        (Threads(2, None, None), {}),
        (Threads(None, None, None), {"TF_NUM_INTRAOP_THREADS": "8"}),
        (Threads(2, 2, None, intra_op=2), {"TF_NUM_INTRAOP_THREADS": "8"}),
        (Threads(2, 2, None), {"TF_NUM_INTRAOP_THREADS": "0"}),
        (Threads(2, 2, None), {"OMP_NUM_THREADS": "2,1"}),
        (Threads(1, 1, None, inter_op=1), {}),
    ],
)
def test_nothing_to_say(facts, variables):
    assert recommend(facts, variables) == ()


@pytest.mark.parametrize(
    ("facts", "variables", "message"),
    [
        (
            Threads(2, 2, None, intra_op=3),
            {},
            "TensorFlow computes with 3 threads (set by tf.config.threading), "
            "but 2 cores can be used: more threads than cores wait for each "
            f"other. {HOW.format(2)}",
        ),
        (
            Threads(64, 64, 1.5),
            {},
            "TensorFlow computes with 64 threads (one for each core it sees), "
            "but 2 cores can be used (the CPU quota of the container is 1.5): "
            f"more threads than cores wait for each other. {HOW.format(2)}",
        ),
        (
            Threads(4, 1, None),
            {"TF_NUM_INTRAOP_THREADS": "4"},
            "TensorFlow computes with 4 threads (set by "
            "TF_NUM_INTRAOP_THREADS), but 1 core can be used (the process is "
            "bound to 1 of 4): more threads than cores wait for each other. "
            f"{HOW.format(1)}",
        ),
        (
            Threads(4, 4, None),
            {"TF_NUM_INTRAOP_THREADS": "1"},
            "TensorFlow computes with 1 thread (set by "
            "TF_NUM_INTRAOP_THREADS), but 4 cores can be used: 3 of the cores "
            f"stay idle. {HOW.format(4)}",
        ),
        (
            Threads(2, 2, None),
            {"OMP_NUM_THREADS": "1"},
            "OMP_NUM_THREADS=1 is not the number of usable cores (2). "
            "TensorFlow from PyPI does not read it, NumPy and a TensorFlow "
            "built with OpenMP do: use OMP_NUM_THREADS=2 python train.py, or "
            "unset OMP_NUM_THREADS.",
        ),
        (
            Threads(2, 2, None, inter_op=1),
            {},
            "TensorFlow runs one operation at a time (inter-op threads: 1). "
            "Leave out "
            "tf.config.threading.set_inter_op_parallelism_threads(1).",
        ),
    ],
)
def test_what_to_set(facts, variables, message):
    assert recommend(facts, variables) == (message,)


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("", {"cpu.max": "150000 100000\n"}, None),
        (
            "0::/outer/inner\n",
            {
                "outer/cpu.max": "200000 100000\n",
                "outer/inner/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        (
            "5:memory:/x\n4:cpu,cpuacct:/box\n0::/\n",
            {
                "cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n",
                "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            "1:cpu:/\n",
            {
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quota_of_the_control_group(own, files, quota, tmp_path):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    read = _probe.cpu_quota(tmp_path / "root", tmp_path / "own")
    assert read == quota


def test_a_part_of_a_core_is_one():
    assert Threads(8, 8, 0.5).usable == 1
    assert Threads(8, 2, 4.0).usable == 2
