"""The peers that train with Keras: stock, rewritten by TensorFlow, tfmixed."""

from typing import Any

import keras
import tensorflow as tf
import workloads

POLICIES = {
    "keras-float32": "float32",
    "keras-bfloat16": "mixed_bfloat16",
    "keras-float16": "mixed_float16",
    "tf-rewrite": "float32",
}


class KerasPeer:
    """Trains a workload with Keras.

    Args:
        peer: Name of the peer.
        workload: Name of the workload.
    """

    def __init__(self, peer: str, workload: str) -> None:
        self._workload = workloads.WORKLOADS[workload]
        self._peer = peer
        self._gpu = bool(tf.config.list_physical_devices("GPU"))
        self._iterator: Any = None
        self._model: Any = None
        self.device = "GPU" if self._gpu else "CPU"
        self.batch = self._workload.batch
        self.format = "float32"

    def build(self) -> None:
        """Builds and compiles the model as its users would."""
        keras.utils.set_random_seed(0)
        if self._peer == "tfmixed":
            model = self._build_prepared()
        else:
            keras.config.set_dtype_policy(POLICIES[self._peer])
            if self._peer == "tf-rewrite":
                self._rewrite()
            model = self._workload.build()
        model.compile(self._workload.optimizer(), workloads.loss())
        self._model = model
        if self._peer != "tf-rewrite":
            self.format = keras.config.dtype_policy().name

    def _build_prepared(self) -> Any:
        # Only here: the other peers do not pay for importing it.
        import tfmixed

        tfmixed.enable(verbose=False)
        return tfmixed.prepare(self._workload.build())

    def _rewrite(self) -> None:
        name = "auto_mixed_precision"
        if not self._gpu:
            name += "_onednn_bfloat16"
        tf.config.optimizer.set_experimental_options({name: True})
        self.format = f"rewritten ({name})"

    def use_batch(self, batch: int) -> None:
        """Makes a batch the one to train on; the next step traces anew."""
        data = tf.data.Dataset.from_tensors(self._workload.data(batch))
        self._iterator = iter(data.repeat().prefetch(tf.data.AUTOTUNE))
        self._model.make_train_function(force=True)

    def use_batch_of_any_size(self, batch: int) -> None:
        """Makes a batch the one to train on; one trace serves all sizes.

        A second trace would count as memory of the larger batch.
        """
        data = tf.data.Dataset.from_tensor_slices(self._workload.data(batch))
        self._iterator = iter(data.batch(batch).repeat())
        self._model.make_train_function()

    def step(self) -> float:
        """Trains on the batch once and waits for the loss."""
        return float(self._model.train_function(self._iterator)["loss"])

    def reset_peak(self) -> None:
        """Forgets the peak of the GPU's memory."""
        tf.config.experimental.reset_memory_stats("GPU:0")

    def peak(self) -> float:
        """Peak memory of the GPU in bytes."""
        return float(tf.config.experimental.get_memory_info("GPU:0")["peak"])
