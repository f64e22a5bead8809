"""`vllm serve` whose weights are read again from a file: a program for vLLM's own environment, which has nothing else
of this project.

Every process of vLLM imports this file as its main module, and so knows the engine `file`.
"""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class Nothing(WeightTransferInitInfo):
    """A file needs no connection."""


@dataclass
class File(WeightTransferUpdateInfo):
    """Weights by their names in a checkpoint of Transformers."""

    path: str


class FromFile(WeightTransferEngine[Nothing, File]):
    """Reads weights from a safetensors file."""

    init_info_cls = Nothing
    update_info_cls = File

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: File) -> None:
        with safe_open(update_info.path, "pt") as stored, torch.device(self.device):
            names = stored.keys()
            self.model.load_weights((name, stored.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("file", FromFile)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
