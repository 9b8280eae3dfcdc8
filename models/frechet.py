"""How far generated images are from real ones, as one number."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="tfmixed_models")
class FrechetDistance(keras.metrics.Metric):
    """Fréchet distance between normal distributions fitted to images.

    Images are averaged over 2 x 2 pixels and projected on the first principal
    components of the real ones. Of each kind the mean and the covariance are
    taken there, and the result is the squared Fréchet distance between the
    two normal distributions: 0 where they agree, lower is better. It is the
    Fréchet inception distance with principal components in the place of a
    network's features, so its numbers compare with each other only.

    All of it is float64, whatever the images are: a covariance is a small
    difference of large sums.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        components: number of principal components.
        name: name of the metric. `tfmixed compare` takes one with "error" in
            it as lower is better.
        dtype: dtype of sums and result.

    Example:

    ```python
    distance = FrechetDistance((28, 28, 1))
    distance.update_state(real_images, generated_images)
    print(float(distance.result()))
    ```

    Reference:
        [GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
        Equilibrium](https://arxiv.org/abs/1706.08500), equation 6.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        components: int = 32,
        name: str = "frechet_error",
        dtype: Any = "float64",
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        height, width, channels = input_shape
        size = (height // 2) * (width // 2) * channels
        self.input_shape = tuple(input_shape)
        self.components = min(components, size)
        self.count = self._sum("count", ())
        self.sums = [self._sum(f"sum_{i}", (size,)) for i in range(2)]
        self.products = [
            self._sum(f"products_{i}", (size, size)) for i in range(2)
        ]

    def _sum(self, name: str, shape: tuple[int, ...]) -> Any:
        return self.add_variable(shape, "zeros", dtype=self.dtype, name=name)

    def update_state(
        self, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> None:
        """Adds a batch.

        Args:
            y_true: real images.
            y_pred: as many generated ones.
            sample_weight: there is none; every image counts.
        """
        for index, images in enumerate((y_true, y_pred)):
            images = ops.cast(images, self.dtype)
            pooled = ops.average_pool(images, 2)
            flat = ops.reshape(pooled, (ops.shape(pooled)[0], -1))
            self.sums[index].assign_add(ops.sum(flat, axis=0))
            self.products[index].assign_add(ops.transpose(flat) @ flat)
        self.count.assign_add(ops.cast(ops.shape(y_true)[0], self.dtype))

    def result(self) -> Any:
        """Computes the squared distance; 0 before the first batch."""
        (mean, covariance), (other_mean, other) = (
            self._moments(index) for index in range(2)
        )
        values, vectors = ops.linalg.eigh(covariance)
        # The eigenvalues ascend.
        basis = vectors[:, -self.components :]
        values = ops.relu(values[-self.components :])
        other = ops.transpose(basis) @ other @ basis
        # The root of the real covariance is diagonal in this basis.
        root = ops.sqrt(values)
        inner = root[:, None] * other * root[None, :]
        eigenvalues, _ = ops.linalg.eigh(inner)
        shift = ops.transpose(basis) @ (mean - other_mean)[:, None]
        return (
            ops.sum(ops.square(shift))
            + ops.sum(values)
            + ops.trace(other)
            - 2 * ops.sum(ops.sqrt(ops.relu(eigenvalues)))
        )

    def _moments(self, index: int) -> tuple[Any, Any]:
        count = ops.maximum(self.count, 1)
        mean = self.sums[index] / count
        second = self.products[index] / count
        return mean, second - mean[:, None] * mean[None, :]

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            **super().get_config(),
            "input_shape": self.input_shape,
            "components": self.components,
        }
