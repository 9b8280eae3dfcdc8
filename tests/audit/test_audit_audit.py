"""The audit as a whole: its result, its policies, its text, its data."""

import dataclasses
import json
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from keras import layers

import tfmixed
from tfmixed.audit import tables
from tfmixed.audit.audit import Audit
from tfmixed.audit.audit import audit
from tfmixed.audit.codes import SEVERITIES
from tfmixed.audit.findings import finding
from tfmixed.audit.static import checks
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe
from tfmixed.prepare import prepare

F16 = "mixed_float16"
CPU = Cpu("Some CPU", "Linux", ("avx512_bf16",), onednn=True)
A100 = describe((Device("GPU", "A100", (8, 0)),), CPU)
NO_GPU = describe((Device("CPU", "Some CPU"),), CPU)
OLD_CPU = describe((Device("CPU", "Old"),), Cpu("Old", "Linux", ("avx2",)))


def classifier(policy=None):
    inputs = keras.Input((16,))
    x = layers.Dense(24, "relu", dtype=policy, name="hidden")(inputs)
    x = layers.BatchNormalization(dtype=policy, name="norm")(x)
    x = layers.Dense(3, "softmax", dtype=policy, name="predictions")(x)
    return keras.Model(inputs, x, name="classifier")


def codes(result):
    return [one.code for one in result.findings]


class TestPolicies:
    def test_float32_model_is_audited_as_if(self):
        model = classifier()
        before = [layer.dtype_policy.name for layer in model.layers]
        result = audit(model, policy=F16, hardware=A100)
        assert (result.policy, result.assumed) == (F16, True)
        assert codes(result)[0] == "TM001"
        assert not result.ok
        assert {row.compute_dtype for row in result.layers} == {"float16"}
        after = [layer.dtype_policy.name for layer in model.layers]
        assert after == before == ["float32"] * 4

    @pytest.mark.parametrize(
        ("hardware", "policy"),
        [
            (A100, "mixed_float16"),
            (NO_GPU, "mixed_bfloat16"),
            (OLD_CPU, "mixed_float16"),
        ],
    )
    def test_default_policy_is_the_plan(self, hardware, policy):
        for wanted in (None, "auto"):
            result = audit(classifier(), policy=wanted, hardware=hardware)
            assert result.policy == policy

    def test_mixed_model_is_audited_as_it_is(self):
        result = audit(classifier("mixed_bfloat16"), hardware=A100)
        assert (result.policy, result.assumed) == ("mixed_bfloat16", False)
        keras.config.set_dtype_policy(F16)
        result = audit(classifier(), policy=F16, hardware=A100)
        assert (result.policy, result.assumed) == (F16, False)

    def test_policy_survives_an_error(self, monkeypatch):
        model = classifier()

        def fail(subject):
            raise RuntimeError("broken check")

        monkeypatch.setattr(checks, "CHECKS", (fail,))
        with pytest.raises(RuntimeError, match="broken check"):
            audit(model, policy=F16)
        assert {layer.compute_dtype for layer in model.layers} == {"float32"}

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match=r"expects a Keras model, got str"):
            audit("resnet")
        with pytest.raises(TypeError, match=r"got function. Pass the model"):
            audit(classifier)
        with pytest.raises(ValueError, match="in float32 there is nothing"):
            audit(classifier(), policy="float32")
        with pytest.raises(ValueError, match="already computes in float16"):
            audit(classifier(F16), policy="mixed_bfloat16")
        with pytest.raises(ValueError, match="`batch_size` got 0"):
            audit(classifier(), batch_size=0)


class TestResult:
    def test_rows(self):
        result = audit(classifier(), policy=F16, hardware=A100)
        rows = {row.path: row for row in result.layers}
        assert list(rows) == ["classifier", "hidden", "norm", "predictions"]
        assert rows["hidden"].parameters == 16 * 24 + 24
        assert rows["norm"].parameters == 4 * 24
        assert rows["classifier"].parameters == 0
        assert rows["predictions"].codes == ("TM001",)
        assert rows["predictions"].treatment == "float32"
        assert rows["hidden"].treatment == "16 bits"
        assert rows["hidden"].class_name == "Dense"
        assert rows["hidden"].policy == F16
        assert "sums of many values" in rows["norm"].reason

    def test_rows_of_composite_layers(self):
        inputs = keras.Input((4, 16))
        x = layers.MultiHeadAttention(2, 8, name="mha")(inputs, inputs)
        result = audit(keras.Model(inputs, x), policy=F16, hardware=A100)
        names = [row.path.split("/")[-1] for row in result.layers]
        assert names[1:6] == ["mha", "query", "key", "value", "softmax"]
        counted = sum(row.parameters for row in result.layers)
        assert counted == keras.Model(inputs, x).count_params()

    def test_errors_come_first_then_the_order_of_the_model(self):
        keras.config.set_dtype_policy(F16)
        inputs = keras.Input((4, 16))
        x = layers.GlobalAveragePooling1D(name="pool")(inputs)
        x = layers.UnitNormalization(name="unit")(x)
        x = layers.Dense(30, name="odd")(x)
        result = audit(keras.Model(inputs, x, name="m"), hardware=A100)
        order = [SEVERITIES.index(one.severity) for one in result.findings]
        assert order == sorted(order)
        errors = [f.layer for f in result.findings if f.severity == "error"]
        assert errors == ["unit", "odd"]

    def test_json_is_strict_and_complete(self):
        result = audit(classifier(), policy=F16, hardware=A100)
        value = json.loads(result.to_json(), parse_constant=pytest.fail)
        assert value["ok"] is False
        assert value["model"] == "classifier"
        assert len(value["layers"]) == 4
        assert value["findings"][0] == dataclasses.asdict(result.findings[0])
        odd = dataclasses.replace(
            result,
            layers=(
                dataclasses.replace(
                    result.layers[0],
                    measured={"a": float("nan"), "b": np.float32("inf")},
                ),
            ),
        )
        measured = json.loads(odd.to_json())["layers"][0]["measured"]
        assert measured == {"a": "nan", "b": "inf"}

    def test_ok_is_without_errors(self):
        result = Audit("m", F16, False, (), ())
        assert result.ok
        warning = finding("TM013", None, "")
        assert dataclasses.replace(result, findings=(warning,)).ok
        error = finding("TM001", None, "")
        assert not dataclasses.replace(result, findings=(warning, error)).ok

    @pytest.mark.slow
    def test_the_function_and_the_package_share_a_name(self):
        code = (
            "import tfmixed\n"
            "from tfmixed.audit.audit import audit\n"
            "tfmixed.audit = audit\n"
            "import tfmixed.audit.codes\n"
            "from tfmixed.audit.findings import Finding\n"
            "from tfmixed.audit.static import checks as static\n"
            "assert tfmixed.audit is audit\n"
            "assert static.CHECKS and Finding\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


class TestText:
    def test_golden(self):
        text = str(audit(classifier(), policy=F16, hardware=A100))
        assert text == (
            "Audit of 'classifier': a float32 model, as if it had the policy "
            "mixed_float16,\n"
            "without data.\n"
            "\n"
            "ERROR TM001 unprotected head\n"
            "  Layer 'predictions' (Dense, softmax) gives its output in "
            "float16: a confident\n"
            "    wrong answer is rounded to exactly 1 and its gradient to 0.\n"
            '  Fix: Give the last layer dtype="float32", or use '
            "tfmixed.prepare(model).\n"
            "\n"
            "NOTE TM008 model too small to gain\n"
            "  Model 'classifier' has 7.3 k multiply-adds in a layer with "
            "weights on average,\n"
            "    for a batch of 32, the size assumed, and 14.6 k in all: too "
            "few to gain from\n"
            "    16 bits.\n"
            "  Fix: Stay with float32, or use a larger batch. tfmixed.compare "
            "measures which\n"
            "    one is faster.\n"
            "\n"
            "\n"
            " layer         class                computes in   parameters   "
            "rules        found\n"
            " " + "─" * 80 + "\n"
            " classifier    Functional           float16                    "
            "its layers\n"
            " hidden        Dense                float16              408   "
            "16 bits\n"
            " norm          BatchNormalization   float16               96   "
            "twin\n"
            " predictions   Dense                float16               75   "
            "float32      TM001\n"
            "\n"
            "1 error, 1 note in 4 layers. tfmixed.prepare(model) takes care of "
            "TM001. Pass\n"
            "data, audit(model, x, y), to measure as well."
        )

    def test_many_findings_of_a_kind_are_told_together(self):
        keras.config.set_dtype_policy(F16)
        inputs = keras.Input((16,))
        x = inputs
        for index in range(60):
            x = layers.UnitNormalization(name=f"unit_{index}")(x)
        x = layers.Dense(3, dtype="float32", name="head")(x)
        result = audit(keras.Model(inputs, x), hardware=A100)
        assert codes(result).count("TM015") == 60
        text = str(result)
        assert len(text.splitlines()) < 70
        assert "The same: unit_1, unit_2, unit_3 and 56 more." in text
        assert "... and 22 more layers; all are in .layers" in text

    def test_nothing_found(self):
        inputs = keras.Input((1024,))
        x = layers.Dense(4096, dtype="mixed_bfloat16")(inputs)
        x = layers.Dense(1024, dtype="float32", name="head")(x)
        result = audit(keras.Model(inputs, x), hardware=A100)
        assert result.findings == ()
        assert str(result).endswith("Nothing was found in 3 layers.")

    def test_square_brackets_are_no_markup(self):
        result = Audit("[bold]m", F16, False, (), ())
        assert "[bold]m" in str(result)
        assert "\\[bold]m" in result.__rich__()
        assert tables.groups(()) == []


class TestModels:
    @pytest.mark.parametrize("policy", [F16, "mixed_bfloat16"])
    def test_prepared_models_have_no_error(self, policy):
        inputs = keras.Input((8, 16))
        x = layers.MultiHeadAttention(2, 8)(inputs, inputs)
        x = layers.LayerNormalization()(x + inputs)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.UnitNormalization()(x)
        x = layers.Dense(3, "softmax", activity_regularizer="l2")(x)
        model = keras.Model(inputs, x)
        before = audit(model, policy=policy, hardware=A100)
        assert not before.ok
        prepared = prepare(model, policy)
        prepared.compile("adam", "sparse_categorical_crossentropy")
        after = audit(prepared, hardware=A100)
        assert set(codes(after)) <= {"TM008"}
        assert after.ok

    def test_what_prepare_left_in_float32_is_no_finding(self):
        inputs = keras.Input((16,))
        x = layers.Dense(16)(inputs)
        x = layers.Dense(3, name="logits")(x)
        x = layers.Activation("softmax")(x)
        prepared = prepare(keras.Model(inputs, x), F16)
        rows = {r.path: r for r in audit(prepared, hardware=A100).layers}
        assert rows["logits"].compute_dtype == "float32"
        assert rows["logits"].codes == ()

    def test_unbuilt_and_subclassed_models(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__(name="own")
                self.dense = layers.Dense(3, "softmax")

            def call(self, x):
                return self.dense(x)

        model = Own()
        result = audit(model, policy=F16, hardware=A100)
        # Nobody knows yet whether the softmax is the output.
        assert codes(result) == ["TM003", "TM017"]
        model(np.ones((2, 16)))
        result = audit(model, policy=F16, hardware=A100)
        assert codes(result)[0] == "TM001"

    def test_guarded_model_with_several_inputs(self):
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        x = layers.Concatenate()([a, b])
        x = layers.Dense(1, dtype="float32")(layers.Dense(8, dtype=F16)(x))
        model = tfmixed.Model({"a": a, "b": b}, x)
        model.compile("adam", "mse")
        result = audit(model, hardware=A100)
        assert set(codes(result)) == {"TM008"}


class TestData:
    def test_measured_columns_and_findings(self):
        x = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
        y = np.arange(32) % 3
        x[3, 2] = np.nan
        model = classifier()
        model.compile("adam", "sparse_categorical_crossentropy")
        result = audit(model, x, y, policy=F16, hardware=A100)
        assert result.measured
        assert "TM107" in codes(result)
        assert codes(result)[0] in ("TM001", "TM107")
        rows = {row.path: row for row in result.layers}
        assert rows["hidden"].measured["largest_output"] > 0
        assert "path" not in rows["hidden"].measured
        text = str(result)
        assert "gradient error" in text
        assert "with data." in text
        json.loads(result.to_json())

    def test_data_build_a_model(self):
        model = keras.Sequential([layers.Dense(3, "softmax")], name="s")
        x = np.ones((8, 16), "float32")
        result = audit(
            model,
            x,
            np.zeros(8),
            loss="sparse_categorical_crossentropy",
            policy=F16,
            hardware=A100,
        )
        assert model.built
        assert "TM001" in codes(result)
        measured = [row for row in result.layers if row.measured]
        assert len(measured) == 1

    def test_batch_size_comes_from_a_dataset(self):
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices(
            (np.ones((8, 16), "float32"), np.zeros(8, "int32"))
        ).batch(4)
        result = audit(
            classifier(),
            data,
            loss="sparse_categorical_crossentropy",
            policy=F16,
            hardware=A100,
        )
        (one,) = (f for f in result.findings if f.code == "TM009")
        assert "a batch of 4" in one.message


@pytest.mark.slow
def test_static_part_of_resnet50_is_fast():
    model = keras.applications.ResNet50(weights=None)
    start = time.perf_counter()
    result = audit(model, policy=F16, hardware=A100)
    # 1 s on two cores that are free; they may not be.
    assert time.perf_counter() - start < 10
    assert codes(result) == ["TM001", "TM015"]
    assert len(result.layers) == 177


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["MobileNetV3Small", "EfficientNetB0", "DenseNet121"]
)
def test_applications(name):
    model = getattr(keras.applications, name)(weights=None)
    result = audit(model, policy=F16, hardware=A100)
    assert "TM001" in codes(result)
    assert "TM017" not in codes(result)
    after = audit(prepare(model, F16), hardware=A100)
    assert after.ok


def test_prepare_alone_does_not_cure_an_overflow():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.Dense(1)]
    )
    model.layers[0].kernel.assign(keras.ops.full((4, 8), 1e5))
    result = audit(model, np.ones((4, 4), "float32"), policy=F16)
    hot = [one for one in result.findings if one.code == "TM101"]
    # Not the Sequential around it, which computes nothing itself.
    assert {one.layer for one in hot} <= {
        "sequential/dense",
        "sequential/dense_1",
    }
    assert hot
    assert "takes care of TM001." in str(result).replace("\n", " ")
