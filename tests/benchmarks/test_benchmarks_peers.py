"""`benchmarks/peers.py`: figures, command line, failures, the torch models."""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import peer_catalogue  # noqa: E402
import peer_data  # noqa: E402
import peer_figures  # noqa: E402
import peer_keras  # noqa: E402
import peer_memory  # noqa: E402
import peer_run  # noqa: E402
import workloads  # noqa: E402

# Of the losses of four steps: rounding grows with the depth of the model.
TOLERANCES = dict.fromkeys(peer_catalogue.WORKLOADS, 1e-3)


def command(*arguments):
    return [sys.executable, str(BENCHMARKS / "peers.py"), *arguments]


def run(*arguments, path=None):
    environment = dict(os.environ)
    if path:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def measured(rounds, **known):
    return (
        peer_run.unmeasured() | {"status": "measured", "rounds": rounds} | known
    )


# Figures


def test_the_speedup_is_the_median_of_the_ratios_of_rounds():
    # Ratios 2, 4 and 3; the ratio of all medians would be 4.
    ours = [[10.0, 10.0, 70.0], [5.0], [1.0]]
    other = [[20.0], [20.0, 1.0, 30.0], [3.0], [1000.0]]
    ratio = peer_figures.speedup(ours, other)
    assert ratio == {"per_round": [2.0, 4.0, 3.0], "median": 3.0}


def test_no_round_in_common_has_no_speedup():
    assert peer_figures.speedup([], [[1.0]]) is None


def test_the_spread_is_the_interquartile_range():
    summary = peer_figures.summarize([[1.0, 2.0], [3.0], [4.0, 100.0]])
    assert summary == {"median_ms": 3.0, "iqr_ms": 2.0}
    assert peer_figures.summarize([[7.0]]) == {"median_ms": 7.0, "iqr_ms": 0.0}
    assert peer_figures.summarize([]) == {"median_ms": None, "iqr_ms": None}


def example():
    """Speed-ups of 2 and 8 over Keras in bfloat16, 3 over float32."""
    result = {}
    for name, bfloat16 in (("mlp", 20.0), ("cnn", 80.0)):
        result[name] = {
            "peers": {
                "keras-float32": measured([[30.0]], memory_mb=100.0),
                "keras-bfloat16": measured([[bfloat16]], first_step_ms=50.0),
                "torch-amp": measured([[9.0]]),
                "tfmixed": measured(
                    [[10.0]],
                    first_step_ms=75.0,
                    memory_mb=55.0,
                    format="mixed_bfloat16",
                ),
            }
        }
        peer_figures.add_figures(result[name])
    return result


def test_targets_are_judged_on_both_sides_of_their_bounds():
    result = example()
    means = peer_figures.geometric_means(result)
    assert means["keras-bfloat16"] == {
        "workloads": ["mlp", "cnn"],
        "mean": pytest.approx(4.0),
        "least": 2.0,
    }
    verdicts = {
        entry["what"]: (entry["value"], entry["passed"])
        for entry in peer_figures.judge(result, means)
    }
    approximate = pytest.approx
    assert verdicts == {
        "mlp: speed-up over keras-float32": (3.0, True),
        "mlp: first step against keras-bfloat16": (1.5, False),
        "cnn: speed-up over keras-float32": (3.0, True),
        "cnn: first step against keras-bfloat16": (1.5, False),
        "cnn: memory of the step against keras-float32": (0.55, True),
        "mean speed-up over keras-bfloat16, geometric (mlp, cnn)": (
            approximate(4.0),
            True,
        ),
        "least speed-up over keras-bfloat16 (mlp, cnn)": (2.0, True),
        "mean speed-up over torch-amp, geometric (mlp, cnn)": (
            approximate(0.9),
            False,
        ),
        "least speed-up over torch-amp (mlp, cnn)": (0.9, False),
    }


def test_what_was_not_measured_is_not_judged():
    result = example()
    del result["cnn"]
    result["mlp"]["peers"]["tfmixed"] = peer_run.unmeasured()
    peer_figures.add_figures(result["mlp"])
    means = peer_figures.geometric_means(result)
    entries = peer_figures.judge(result, means)
    assert entries
    assert all(entry["passed"] is None for entry in entries)


def test_the_catalogue_names_what_there_is():
    assert tuple(workloads.WORKLOADS) == peer_catalogue.WORKLOADS
    assert tuple(peer_data.DATA) == peer_catalogue.WORKLOADS
    assert set(peer_catalogue.SPEEDUPS) <= set(peer_catalogue.WORKLOADS)
    assert set(peer_catalogue.MEANS) <= set(peer_catalogue.PEERS)


@pytest.mark.skipif(sys.platform != "linux", reason="resets the peak")
def test_the_memory_of_a_step_is_what_the_batch_takes():
    blocks = []

    def use_batch(size):
        blocks[:] = [size]

    def step():
        return float(np.ones(blocks[0] * 10**6, "uint8")[-1])

    meter = (peer_memory.reset_resident_peak, peer_memory.resident_peak)
    answer = peer_memory.memory_of_step(use_batch, step, *meter, 200)
    assert answer["memory_mb"] == pytest.approx(199, abs=10)
    answer = peer_memory.memory_of_step(use_batch, step, *meter, 2)
    assert answer == {"memory_mb": None, "memory_note": "under 10"}


# The command line


def test_help_needs_no_framework(tmp_path):
    for name in ("tensorflow", "keras", "torch", "numpy", "tfmixed"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    done = run("--help", path=tmp_path)
    assert done.returncode == 0, done.stderr
    for peer in peer_catalogue.PEERS:
        assert peer in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "mlp,mlpp"], "unknown: mlpp; choose from mlp, cnn,"),
        (["--peers", "jax"], "unknown: jax; choose from keras-float32,"),
        (["--peers", ","], "unknown: the empty name"),
        (["--rounds", "0"], "a whole number of at least 1, got '0'"),
        (
            ["--json", "/no/such/folder/a"],
            "cannot write to '/no/such/folder/a'",
        ),
        (["--markdown", "/"], "cannot write to '/'"),
    ],
)
def test_wrong_arguments_are_told_at_once(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


# Peers that fail


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (
            "raise ModuleNotFoundError('no torch', name='torch')",
            "left out",
            "torch is not installed",
        ),
        (
            "import os; os.write(2, b'boom'); os._exit(3)",
            "failed",
            "ended with 3: boom",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            "failed",
            "was killed, out of memory or hanging? it left no message",
        ),
        (
            "import os; print('{'); os.write(1, b'chatter');"
            "raise OSError('no [kernels]\\nand more')",
            "failed",
            "OSError: no [kernels]",
        ),
    ],
)
def test_a_peer_that_fails_says_why(tmp_path, code, status, words):
    (tmp_path / "torch.py").write_text(code)
    arguments = ("--quick", "--only", "mlp", "--peers", "torch-amp")
    file, table = tmp_path / "a.json", tmp_path / "a.md"
    done = run(*arguments, "--json", file, "--markdown", table, path=tmp_path)
    assert done.returncode == 1, done.stderr
    peer = json.loads(file.read_text())["workloads"]["mlp"]["peers"][
        "torch-amp"
    ]
    assert (peer["status"], peer["error"]) == (status, words)
    assert f"torch-amp: {status}: {words}" in table.read_text()


def test_the_worker_refuses_names_it_does_not_know():
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "peer_worker.py", "mlp", "jax"],
        input="",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "unknown: workload 'mlp' with peer 'jax'" in done.stdout


@pytest.mark.slow
def test_the_others_go_on_without_a_peer_that_fails(tmp_path):
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    file = tmp_path / "a.json"
    done = run(
        *("--quick", "--no-memory", "--only", "mlp", "--json", file),
        *("--peers", "torch-amp,keras-float32"),
        path=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    peers = json.loads(file.read_text())["workloads"]["mlp"]["peers"]
    assert peers["torch-amp"]["status"] == "failed"
    assert peers["keras-float32"]["status"] == "measured"
    assert peers["torch-amp"]["error"].startswith("ended with -6")


# Whole runs


@pytest.mark.slow
def test_a_quick_run_measures_and_the_figures_follow(tmp_path):
    file, table = tmp_path / "a.json", tmp_path / "a.md"
    names = ["mlp", "embedding"]
    done = run(
        *("--quick", "--rounds", "2", "--only", ",".join(names)),
        *("--peers", "keras-float32,tfmixed"),
        *("--json", file, "--markdown", table),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert not result["interrupted"]
    assert result["settings"]["rounds"] == 2
    assert result["versions"]["keras"] == keras.__version__
    assert result["versions"]["numpy"] == np.__version__
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["features"]
    assert "--quick" in result["command"]
    assert list(result["workloads"]) == names
    for workload in result["workloads"].values():
        _check_workload(workload)
    ratios = [
        workload["speedups"]["keras-float32"]["median"]
        for workload in result["workloads"].values()
    ]
    assert {entry["what"]: entry["value"] for entry in result["targets"]}[
        "mlp: speed-up over keras-float32"
    ] == ratios[0]
    for text in (table.read_text(), done.stdout):
        assert f"{ratios[0]:.2f}" in text
        assert keras.__version__ in text
    assert result["command"][-1] in table.read_text()


def _check_workload(workload):
    ours, other = (
        workload["peers"][name] for name in ("tfmixed", "keras-float32")
    )
    for peer in (ours, other):
        assert peer["status"] == "measured"
        assert peer["batch"] == 4
        assert peer["first_step_ms"] > 0
        assert peer["build_ms"] > 0
        assert np.isfinite(peer["loss"])
        # Of each turn of four steps the first does not count.
        assert [len(turn) for turn in peer["rounds"]] == [3, 3]
        steps = sum(peer["rounds"], [])
        assert peer["median_ms"] == pytest.approx(np.median(steps))
        low, high = np.percentile(steps, [25, 75])
        assert peer["iqr_ms"] == pytest.approx(high - low)
        assert peer["memory_mb"] or peer["memory_note"] == "under 10"
    ratios = [
        np.median(slow) / np.median(fast)
        for slow, fast in zip(other["rounds"], ours["rounds"], strict=True)
    ]
    speedup = workload["speedups"]["keras-float32"]
    assert speedup["per_round"] == pytest.approx(ratios)
    assert speedup["median"] == pytest.approx(statistics.median(ratios))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    file = tmp_path / "a.json"
    process = subprocess.Popen(
        command(
            *("--quick", "--no-memory", "--only", "mlp,cnn"),
            *("--peers", "keras-float32", "--json", str(file)),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The first workload is done; the second is starting.
    assert process.stderr.readline().startswith("mlp: keras-float32 ")
    while not (children := psutil.Process(process.pid).children()):
        pass
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted" in output
    result = json.loads(file.read_text())
    assert result["interrupted"]
    assert result["workloads"]["mlp"]["peers"]["keras-float32"]["rounds"]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


# The models of PyTorch


def arrays_for_torch(name, model):
    """The weights of a Keras model in the order of the torch parameters."""
    layers = [layer for layer in model.layers if layer.weights]
    if name == "resnet50":
        # Keras orders by depth; in PyTorch a block is defined at a time.
        layers.sort(key=lambda layer: _place_in_resnet(layer.name))
    arrays = []
    for layer in layers:
        arrays += _arrays_of(layer)
    return arrays


def _place_in_resnet(name):
    if not name.startswith("conv"):
        return (9,)
    stage, _, rest = name.removeprefix("conv").partition("_")
    block, _, part = rest.removeprefix("block").rpartition("_")
    block, _, index = block.partition("_")
    return (int(stage), int(block or 0), int(index or 0), part == "bn")


def _arrays_of(layer):
    if isinstance(layer, keras.layers.MultiHeadAttention):
        query, query_bias, key, key_bias, value, value_bias, output, bias = (
            layer.get_weights()
        )
        width = query.shape[0]
        kernels = [k.reshape(width, -1).T for k in (query, key, value)]
        biases = [b.ravel() for b in (query_bias, key_bias, value_bias)]
        output = output.reshape(-1, width).T
        return [np.concatenate(kernels), np.concatenate(biases), output, bias]
    weights = [weight.numpy() for weight in layer.trainable_weights]
    if isinstance(layer, keras.layers.LSTM):
        kernel, recurrent, bias = weights
        return [kernel.T, recurrent.T, bias, np.zeros_like(bias)]
    if isinstance(layer, keras.layers.Dense):
        weights[0] = weights[0].T
    if isinstance(layer, keras.layers.Conv2D):
        weights[0] = weights[0].transpose(3, 2, 0, 1)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", peer_catalogue.WORKLOADS)
def test_the_torch_model_is_the_same_mathematics(name):
    torch = pytest.importorskip("torch")
    import torch_workloads
    from peer_torch import TorchPeer

    theirs = workloads.WORKLOADS[name]
    model = theirs.build()
    x, y = theirs.data(4)
    peer = TorchPeer(name)
    peer.build()
    ours = peer._model.cpu()
    arrays = arrays_for_torch(name, model)
    parameters = list(ours.parameters())
    # The same shapes, so the same number of parameters too.
    assert [a.shape for a in arrays] == [tuple(p.shape) for p in parameters]
    assert sum(p.numel() for p in parameters if p.requires_grad) == sum(
        int(np.prod(weight.shape)) for weight in model.trainable_weights
    )
    with torch.no_grad():
        for parameter, array in zip(parameters, arrays, strict=True):
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    # Not Adam: it turns the rounding of tiny gradients into whole steps.
    model.compile(keras.optimizers.SGD(0.02), workloads.loss())
    inputs = torch.from_numpy(x)
    if torch_workloads.WORKLOADS[name].images:
        inputs = inputs.permute(0, 3, 1, 2)
    optimizer = torch.optim.SGD(ours.parameters(), 0.02)
    expected, losses = [], []
    for _ in range(3):
        expected.append(float(model.train_on_batch(x, y)))
        model.reset_metrics()
        optimizer.zero_grad()
        loss = torch_workloads.loss(ours(inputs), torch.from_numpy(y).long())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # The update is compared from the second on; it moves the loss.
    assert losses[0] == pytest.approx(expected[0], rel=1e-4)
    assert losses == pytest.approx(expected, rel=TOLERANCES[name])
    assert abs(expected[-1] - expected[0]) > 10 * TOLERANCES[name]


@pytest.mark.slow
def test_the_memory_of_two_batches_is_measured_with_one_trace():
    before = keras.config.dtype_policy()
    peer = peer_keras.KerasPeer("keras-float32", "mlp")
    peer.build()
    seen = []
    for batch in (1, 4):
        peer.use_batch_of_any_size(batch)
        peer.step()
        # What a trace is made for.
        seen.append((peer._model.train_function, peer._iterator.element_spec))
    keras.config.set_dtype_policy(before)
    assert seen[0] == seen[1]
