"""The peer that trains with PyTorch: what its AMP recipe says.

`torch.autocast` decides for each operation, the head included. On a CPU it
computes in bfloat16, also the LSTM; on a CUDA GPU in float16, with a
`GradScaler`. Images are channels_last and the optimizer is the fused one.
"""

from typing import Any

import torch
import torch_workloads
from peer_data import DATA


class TorchPeer:
    """Trains a workload with PyTorch.

    Args:
        workload: Name of the workload.
    """

    def __init__(self, workload: str) -> None:
        self._workload = torch_workloads.WORKLOADS[workload]
        self._data, self.batch = DATA[workload]
        self._place = "cuda" if torch.cuda.is_available() else "cpu"
        self._dtype = torch.bfloat16
        if self._place == "cuda":
            self._dtype = torch.float16
        self._scaler = torch.amp.GradScaler(
            self._place, enabled=self._place == "cuda"
        )
        self._model: Any = None
        self._optimizer: Any = None
        self._x = self._y = torch.empty(0)
        self.device = "GPU" if self._place == "cuda" else "CPU"
        self.format = f"autocast {str(self._dtype).removeprefix('torch.')}"

    def build(self) -> None:
        """Builds the model and its optimizer."""
        torch.manual_seed(0)
        self._model = self._workload.build().to(self._place)
        if self._workload.images:
            self._model.to(memory_format=torch.channels_last)
        self._model.train()
        self._optimizer = self._workload.optimizer(self._model.parameters())

    def use_batch(self, batch: int) -> None:
        """Makes a batch the one to train on."""
        x, y = map(torch.from_numpy, self._data(batch))
        if self._workload.images:
            # The data are in the layout of Keras: this view is channels_last.
            x = x.permute(0, 3, 1, 2)
        self._x = x.to(self._place)
        self._y = y.long().to(self._place)

    # Nothing is traced.
    use_batch_of_any_size = use_batch

    def step(self) -> float:
        """Trains on the batch once and waits for the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._place, self._dtype):
            logits = self._model(self._x)
        loss = torch_workloads.loss(logits, self._y)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._place == "cuda":
            # The loss is there before the update is.
            torch.cuda.synchronize()
        return float(loss)

    def reset_peak(self) -> None:
        """Forgets the peak of the GPU's memory."""
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """Peak memory of the GPU in bytes."""
        return float(torch.cuda.max_memory_allocated())
